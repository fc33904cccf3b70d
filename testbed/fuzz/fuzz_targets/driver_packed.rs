//! The driver's end of a packed ring, in each of its paths, against a peer that lies.
#![no_main]

use testbed::rings::Direction;

libfuzzer_sys::fuzz_target!(|data: &[u8]| testbed_fuzz::driver_end(data, Direction::packed_sets));
