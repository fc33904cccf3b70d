//! Receiving a frame of one segment writes the first cache line of its mbuf only: what the last user left in the second is still
//! there. On every path of both ends.

use std::collections::HashMap;

use pmd::port::Burst;
use testbed::rings::{Direction, Pair, Setup, packet};

const BURST: usize = 32;
const ROUNDS: u32 = 100;

#[test]
fn receiving_leaves_the_second_line_as_it_was() {
    for direction in Direction::ALL {
        for features in direction.feature_sets() {
            let mut pair = Pair::new(direction, &Setup::new(features)).unwrap();
            let (mut going, mut coming) = (Burst::new(BURST), Burst::new(BURST));
            // Which mbuf, by its data room, and the mark that was left in its second line.
            let mut marks: HashMap<u64, u32> = HashMap::new();
            let mut known = 0;
            for mark in 1..=ROUNDS {
                for _ in 0..BURST {
                    going.push(packet(pair.sender_pool(), &[7; 60], 60).unwrap()).unwrap();
                }
                assert_eq!(pair.sender.queue.tx_burst(&mut going), BURST, "{pair}");
                assert_eq!(pair.receiver.queue.rx_burst(&mut coming), BURST, "{pair}");
                for mbuf in coming.as_mut_slice() {
                    if let Some(left) = marks.insert(mbuf.data_iova(), mark) {
                        assert_eq!(mbuf.seqn(), left, "{pair}");
                        known += 1;
                    }
                    mbuf.set_seqn(mark);
                }
                coming.free();
            }
            assert!(known > BURST as u32 * ROUNDS / 2, "{pair}: only {known} mbufs came back");
            assert_eq!(pair.stop(), 0);
        }
    }
}
