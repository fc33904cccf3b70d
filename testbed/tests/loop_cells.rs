//! `twinring loop` measures every cell it is asked for, and accounts for every frame.

mod loop_support;

use std::collections::BTreeSet;

use loop_support::{run, stderr, stdout};
use serde_json::{Value, json};
use testbed::peer::turn;

/// The cells that `args` select, each of which must balance.
fn cells(args: &str) -> Vec<Value> {
    let output = run(&format!("loop --json --seconds 0.1 {args}"));
    assert_eq!(output.status.code(), Some(0), "{args}: {}", stderr(&output));
    let results: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(results.as_object().unwrap().keys().collect::<Vec<_>>(), ["cells"]);
    let cells = results["cells"].as_array().unwrap().clone();
    cells.iter().for_each(must_balance);
    cells
}

fn must_balance(cell: &Value) {
    let number = |value: &Value| value.as_u64().unwrap();
    let dropped: u64 = cell["dropped"].as_object().unwrap().values().map(number).sum();
    assert_eq!(number(&cell["sent"]), number(&cell["received"]) + dropped, "{cell}");
    assert!(number(&cell["received"]) > 0, "{cell}");
    let rate = |key: &str| cell[key].as_f64().unwrap();
    assert!(rate("mpps_low") <= rate("mpps") && rate("mpps") <= rate("mpps_high") && rate("mpps_high") > 0.0, "{cell}");
}

/// How a guest of ours names the path of a combination.
fn path(ring: &str, in_order: bool, mergeable: bool) -> (String, String) {
    let in_order = if in_order { "-in-order" } else { "" };
    (format!("{ring}{in_order}{}", if mergeable { "-mergeable" } else { "" }), format!("{ring}{in_order}"))
}

#[test]
fn every_ring_combination_passes_frames_both_ways_and_loses_none() {
    let _turn = turn();
    let cells = cells("--queues 2");
    let mut seen = BTreeSet::new();
    for cell in &cells {
        let (in_order, mergeable) = (cell["in_order"].as_bool().unwrap(), cell["mergeable"].as_bool().unwrap());
        let [ring, engine] = ["ring", "engine"].map(|key| cell[key].as_str().unwrap());
        let (rx_path, tx_path) = path(ring, in_order, mergeable);
        assert_eq!((&cell["rx_path"], &cell["tx_path"]), (&rx_path.into(), &tx_path.into()), "{cell}");
        seen.insert((ring, in_order, mergeable, engine));
    }
    assert_eq!((cells.len(), seen.len()), (16, 16));
}

#[test]
fn json_has_the_documented_keys_and_nothing_else() {
    let _turn = turn();
    let cells = cells(
        "--engine io --ring split --in-order on --mergeable on --queues 1 --frame 1500 --burst 16 --ring-size 256",
    );
    let keys: BTreeSet<&str> = cells[0].as_object().unwrap().keys().map(String::as_str).collect();
    let documented = [
        "engine",
        "ring",
        "in_order",
        "mergeable",
        "simd",
        "queues",
        "frame",
        "burst",
        "guest",
        "host",
        "mpps",
        "mpps_low",
        "mpps_high",
        "rx_path",
        "tx_path",
        "sent",
        "received",
        "dropped",
    ];
    assert_eq!(keys, BTreeSet::from(documented));
    let asked = json!({
        "engine": "io", "ring": "split", "in_order": true, "mergeable": true, "simd": "none", "queues": 1, "frame": 1500,
        "burst": 16, "guest": "twinring", "host": "twinring",
    });
    for (key, value) in asked.as_object().unwrap() {
        assert_eq!(cells[0][key], *value, "{key}");
    }
}

#[test]
fn frames_that_need_several_buffers_are_accounted_for_too() {
    let _turn = turn();
    let cells = cells("--frame 9000 --mergeable on --queues 1");
    assert_eq!(cells.len(), 8);
}

#[test]
fn frames_that_no_buffer_can_take_are_counted_as_dropped() {
    let _turn = turn();
    let output =
        run("loop --json --seconds 0.1 --engine rxonly --frame 9000 --mergeable off --in-order off --queues 1");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let cell = &serde_json::from_str::<Value>(&stdout(&output)).unwrap()["cells"][0];
    assert_eq!((&cell["received"], &cell["dropped"]["host_tx_long"]), (&0.into(), &cell["sent"]));
    assert!(cell["sent"].as_u64().unwrap() > 0);
}

#[test]
fn the_table_has_a_row_for_each_combination_and_says_how_it_came_about() {
    let _turn = turn();
    let args = "loop --seconds 0.1 --ring split --queues 1,2 --in-order on,off --mergeable off";
    let output = run(args);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    let words = |line: usize| text.lines().nth(line).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!(words(0), ["host", "twinring,", "guest", "twinring", "rxonly", "io"]);
    assert_eq!(words(1), ["queue", "pairs", "1", "2", "1", "2"]);
    for (line, name) in [(2, vec!["split,", "in", "order"]), (3, vec!["split"])] {
        let (row, rates) = (words(line), words(line).len() - 4);
        assert_eq!(row[..rates], name);
        assert!(row[rates..].iter().all(|rate| rate.parse::<f64>().unwrap() > 0.0), "{text}");
    }
    for part in
        ["  split-in-order, split-in-order  split-in-order, split", "Mpps", "machine: ", &format!("twinring {args}")]
    {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

#[test]
fn the_reference_backend_can_be_the_host() {
    let _turn = turn();
    assert_eq!(cells("--host reference --queues 1,2").len(), 16, "split rings only");
}

#[test]
fn dpdk_can_be_either_end() {
    let _turn = turn();
    let cells = cells("--host twinring,dpdk,reference --guest dpdk --queues 2 --in-order on --mergeable off,on");
    assert_eq!(cells.len(), 20);
    assert_eq!(self::cells("--host dpdk --queues 1").len(), 16);
}
