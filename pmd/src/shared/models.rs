//! A baton's value has one owner at a time, who sees all that the owners before did; loom reports accesses that nothing orders.

use std::sync::Arc;

use loom::thread;

use super::{Baton, UnsafeCell};

/// What a queue has besides the value itself, say its ring: the hand-over must publish writes to that, too.
type Beside = Arc<UnsafeCell<()>>;

/// One burst of the holder.
fn burst((bursts, beside): &mut (u32, Beside)) {
    *bursts += 1;
    // A write as loom sees it.
    beside.with_mut(|_| ());
}

#[test]
fn a_hand_over_publishes_what_was_written_before() {
    loom::model(|| {
        let baton = Arc::new(Baton::new((0, Beside::default())));
        let worker = thread::spawn({
            let baton = Arc::clone(&baton);
            move || (0..2).filter(|_| baton.try_claim().map(|mut claim| claim.with(burst)).is_some()).count() as u32
        });
        let control = baton.claim(2, thread::yield_now).map(|mut claim| claim.with(burst));
        let bursts = u32::from(control.is_some()) + worker.join().unwrap();
        let counted = baton.try_claim().expect("nobody holds it").with(|(bursts, _)| *bursts);
        assert_eq!(counted, bursts);
    });
}

#[test]
fn whoever_waits_gets_it_after_the_burst() {
    loom::model(|| {
        let baton = Arc::new(Baton::new(0));
        let mut held = baton.try_claim().unwrap();
        let control = thread::spawn({
            let baton = Arc::clone(&baton);
            move || {
                let mut claim = baton.claim(usize::MAX, thread::yield_now).unwrap();
                claim.with(|value| *value)
            }
        });
        held.with(|value| *value = 7);
        drop(held);
        assert_eq!(control.join().unwrap(), 7, "the burst was over, and all of it there");
    });
}
