//! The command line as its users meet it: the real binary, on stores of its own.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has to fail, its helpers included"
)]

mod bench;
mod engines;
mod exclusion;
mod fencing;
mod lifetime;
mod manual;
mod names;
mod operators;
mod run;
mod terminal;
mod usage;
