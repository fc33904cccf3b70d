//! However `twinring loop` ends, it says why, and leaves neither processes nor files behind.

mod loop_support;

use loop_support::{Run, signal, start, stderr, stdout, ticks, until};
use testbed::peer::turn;

const LONG: &str = "loop --seconds 600 --queues 1 --ring split --in-order off --mergeable off";
const ROLES: [(&str, &str); 2] = [("backend-role", "host"), ("guest-role", "guest")];

/// A run that has just started its guest, and then one through which frames flow.
fn runs() -> impl Iterator<Item = Run> {
    let early = || {
        let run = start(LONG);
        run.child("guest-role");
        run
    };
    [early as fn() -> Run, || flowing(start(LONG))].into_iter().map(|make| make())
}

/// A host polls, and so uses CPU time, only while frames flow.
fn flowing(run: Run) -> Run {
    let host = run.child("backend-role");
    until("frames", || ticks(host) > 20);
    run
}

#[test]
fn an_end_that_is_killed_is_named_and_takes_the_other_one_with_it() {
    let _turn = turn();
    for (role, name) in ROLES {
        for mut run in runs() {
            signal(run.child(role), "KILL");
            let output = run.end();
            let said = stderr(&output);
            assert_eq!((output.status.code(), stdout(&output)), (Some(1), String::new()), "{said}");
            let sentence = format!("the {name} ended (signal: 9 (SIGKILL))");
            assert!(said.contains(&sentence) && said.lines().count() == 1, "{sentence} is not all of {said}");
            run.must_leave_nothing();
        }
    }
}

#[test]
fn an_end_that_is_asked_to_end_is_named_too() {
    let _turn = turn();
    for (role, name) in ROLES {
        let mut run = flowing(start(LONG));
        signal(run.child(role), "TERM");
        let output = run.end();
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains(&format!("the {name} ")), "{}", stderr(&output));
        run.must_leave_nothing();
    }
}

#[test]
fn ctrl_c_ends_everything_at_once() {
    let _turn = turn();
    for name in ["INT", "TERM"] {
        for mut run in runs() {
            signal(run.pid(), name);
            let output = run.end();
            assert_eq!(output.status.code(), Some(130));
            assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));
            run.must_leave_nothing();
        }
    }
}

#[test]
fn both_ends_end_by_themselves_when_their_parent_is_killed() {
    let _turn = turn();
    let mut run = flowing(start(LONG));
    signal(run.pid(), "KILL");
    assert_eq!(run.end().status.code(), None);
    until("end of both processes", || run.processes().is_empty());
}
