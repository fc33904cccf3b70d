//! The testbed: what runs the two ends against each other and against everybody else's, and judges what comes out.

pub mod frame;
pub mod ledger;
pub mod peer;
pub mod rings;
