//! The testbed: what runs the two ends against each other and against everybody else's, and judges what comes out.
//!
//! # Files that may hold `unsafe`
//!
//! `sys.rs` (a counting allocator, and seccomp). The workspace denies it everywhere else.

pub mod cli;
pub mod compare;
pub mod frame;
pub mod frontend;
pub mod hostile;
pub mod ledger;
pub mod pair;
pub mod peer;
pub mod ports;
pub mod rings;
pub mod sys;
pub mod table;
