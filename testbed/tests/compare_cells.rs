//! `twinring compare` runs every cell with each pair of ends, accounts for every frame, and tells the ratio.

mod loop_support;

use std::collections::BTreeSet;

use loop_support::{run, stderr, stdout};
use serde_json::{Map, Value};
use testbed::peer::turn;

const CELL: &str = "--engine rxonly --ring split --in-order off --mergeable off --seconds 0.1 --rounds 1";

fn cells(args: &str) -> Vec<Map<String, Value>> {
    let output = run(&format!("compare --json {args}"));
    assert_eq!(output.status.code(), Some(0), "{args}: {}", stderr(&output));
    let results: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(results.as_object().unwrap().keys().collect::<Vec<_>>(), ["cells"]);
    results["cells"].as_array().unwrap().iter().map(|cell| cell.as_object().unwrap().clone()).collect()
}

fn must_balance(cell: &Map<String, Value>) {
    let number = |value: &Value| value.as_u64().unwrap();
    let dropped: u64 = cell["dropped"].as_object().unwrap().values().map(number).sum();
    assert_eq!(number(&cell["sent"]), number(&cell["received"]) + dropped, "{cell:?}");
    assert!(number(&cell["received"]) > 0, "{cell:?}");
}

fn ends(cell: &Map<String, Value>) -> [&str; 2] {
    ["host", "guest"].map(|key| cell[key].as_str().unwrap())
}

#[test]
fn dpdk_s_pair_has_the_keys_of_a_loop_cell_and_ours_its_ratio_besides() {
    let _turn = turn();
    let cells = cells(CELL);
    cells.iter().for_each(must_balance);
    assert_eq!(cells.iter().map(ends).collect::<Vec<_>>(), [["twinring"; 2], ["dpdk"; 2]]);
    let keys = |cell: &Map<String, Value>| cell.keys().cloned().collect::<BTreeSet<_>>();
    let documented = "engine ring in_order mergeable simd queues frame burst guest host mpps mpps_low mpps_high rx_path tx_path \
                      sent received dropped";
    let mut documented: BTreeSet<_> = documented.split_whitespace().map(str::to_owned).collect();
    assert_eq!(keys(&cells[1]), documented);
    documented.extend(["ratio", "ratio_low", "ratio_high"].map(str::to_owned));
    assert_eq!(keys(&cells[0]), documented);

    let rate = |cell: &Map<String, Value>, key| cell[key].as_f64().unwrap();
    let [ours, dpdk] = [&cells[0], &cells[1]];
    let ratio = rate(ours, "mpps") / rate(dpdk, "mpps");
    // Both rates and their ratio are rounded to thousandths.
    assert!((rate(ours, "ratio") - ratio).abs() < 0.01, "{ratio} {ours:?}");
    assert_eq!([&ours["ratio_low"], &ours["ratio_high"]], [&ours["ratio"]; 2], "one round has no interval");
}

#[test]
fn dpdk_is_mixed_with_our_ends_when_all_pairs_are_asked_for() {
    let _turn = turn();
    let cells = cells(&format!("loop --all {CELL}"));
    cells.iter().for_each(must_balance);
    let seen: Vec<_> = cells.iter().map(|cell| (ends(cell), cell.contains_key("ratio"))).collect();
    let all = [["twinring"; 2], ["dpdk"; 2], ["dpdk", "twinring"], ["twinring", "dpdk"]];
    assert_eq!(seen, all.map(|ends| (ends, ends != ["dpdk"; 2])));
}

#[test]
fn dpdk_s_version_the_machine_and_the_command_stand_under_the_table() {
    let _turn = turn();
    let args = "compare --engine io --ring split --in-order on,off --mergeable off --seconds 0.1 --rounds 2";
    let output = run(args);
    let (text, said) = (stdout(&output), stderr(&output));
    assert_eq!(output.status.code(), Some(0), "{text}{said}");
    assert!(said.contains("2 cells x 2 pairs of ends x 2 rounds of 0.1 s: about "), "{said}");
    let words = |line: usize| text.lines().nth(line).unwrap().split_whitespace().collect::<Vec<_>>();
    for (line, name) in [(2, vec!["io", "split,", "in", "order", "1"]), (3, vec!["io", "split", "1"])] {
        let (row, rates) = (words(line), name.len());
        assert_eq!((&row[..rates], row.len()), (&name[..], rates + 5), "{text}");
        let numbers: Vec<f64> = row[rates..].iter().map(|number| number.parse().unwrap()).collect();
        assert!(numbers[3] <= numbers[4] && numbers.iter().all(|number| *number > 0.0), "{text}");
    }
    for part in
        ["host twinring, guest twinring\n", "median of 2 rounds", "machine: ", "DPDK: ", &format!("twinring {args}")]
    {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}
