//! The testbed: what runs the two ends against each other and against everybody else's, and judges what comes out.

pub mod cli;
pub mod frame;
pub mod hostile;
pub mod ledger;
pub mod pair;
pub mod peer;
pub mod ports;
pub mod rings;
pub mod table;
