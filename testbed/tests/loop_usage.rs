//! What `twinring` cannot do is said in one sentence.

mod loop_support;

use loop_support::{run, stderr, stdout};

#[test]
fn usage_errors_are_one_sentence_and_exit_code_2() {
    for (args, sentence) in [
        ("", "requires a subcommand"),
        ("frob", "unrecognized subcommand 'frob'"),
        ("loop --frob", "unexpected argument '--frob'"),
        ("loop --queues", "a value is required for '--queues <LIST>'"),
        ("loop --engine txonly", "[possible values: rxonly, io]"),
        ("loop --ring torn", "[possible values: split, packed]"),
        ("loop --ring packed --host reference", "the reference backend has split rings only; use --ring split"),
        ("loop --in-order maybe", "[possible values: on, off]"),
        ("loop --simd avx2", "[possible values: none]"),
        ("loop --guest reference", "[possible values: twinring, dpdk]"),
        ("loop --host qemu", "[possible values: twinring, dpdk, reference]"),
        ("loop --rx-path warp", "--rx-path: no path is called warp; there are packed"),
        ("loop --frame -1", "write a whole number, 60 to 9000"),
        ("loop --queues 1,0", "write a whole number, 1 to 128"),
        ("loop --frame 59", "write a whole number, 60 to 9000"),
        ("loop --burst 513", "write a whole number, 1 to 512"),
        ("loop --ring-size 100", "a power of two of descriptors, 64 to 32768"),
        ("loop --ring-size 65536", "a power of two of descriptors, 64 to 32768"),
        ("loop --seconds 0", "write 0.01 to 3600 seconds"),
        ("loop --seconds NaN", "write 0.01 to 3600 seconds"),
        ("loop --cpus 0", "write the host's CPU and the guest's, like 0,1"),
        ("loop --cpus 0,1000", "CPU 1000 cannot be used; those that can are "),
        ("loop --guest dpdk --rx-path split", "--rx-path chooses a path of our guest, but no guest is ours"),
        ("compare pair", "[possible values: loop]"),
        ("compare --rounds 0", "write a whole number, 1 to 99"),
        ("compare --guest dpdk", "unexpected argument '--guest'"),
        ("compare loop --queues 17", "write a whole number, 1 to 16"),
        ("loop --host dpdk --queues 16,17", "17 queue pairs with --host dpdk: it adds up the counters of its first 16"),
        ("loop --queues 129", "write a whole number, 1 to 128"),
        ("compare --seconds 0", "write 0.01 to 3600 seconds"),
        ("compare --cpus 0,1000", "CPU 1000 cannot be used; those that can are "),
    ] {
        let output = run(args);
        let said = stderr(&output);
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{args}: {said}");
        assert!(said.contains(sentence) && said.lines().count() == 1, "{args}: {said}");
    }
}

#[test]
fn what_cannot_be_done_is_one_sentence_and_exit_code_1() {
    for (args, sentence) in [
        ("loop --tx-path split-in-order --in-order off", "split-in-order"),
        ("loop --guest dpdk --dpdk-root /nonexistent", "dpdk-testpmd does not run in /nonexistent"),
        ("compare --dpdk-root /nonexistent", "dpdk-testpmd does not run in /nonexistent"),
        ("compare --dpdk-root /nonexistent --json", "or run testbed/check, which does"),
    ] {
        let output = run(args);
        let said = stderr(&output);
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(1), ""), "{args}: {said}");
        assert!(said.contains(sentence) && said.lines().count() == 1, "{args}: {said}");
    }
}

#[test]
fn help_goes_to_standard_output() {
    let common = ["--engine", "--ring-size", "--cpus", "--json", "[default: rxonly,io]", "[default: split,packed]"];
    for (command, own) in [("loop", ["--guest", "[default: 1,2,3]"]), ("compare", ["--rounds", "--all"])] {
        let output = run(&format!("{command} --help"));
        assert_eq!(output.status.code(), Some(0));
        for option in common.iter().chain(&own) {
            assert!(stdout(&output).contains(option), "{command} {option}");
        }
        assert!(!stdout(&output).contains("-role"));
    }
}
