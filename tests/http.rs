//! The HTTP layer, through a real server and a real client: the storage cases over HTTP, every
//! refusal, and what each mode promises of handlers that stall, panic or are cancelled.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

#[path = "http/client.rs"]
mod client;
#[path = "http/conformance.rs"]
mod conformance;
#[path = "http/hold.rs"]
mod hold;
#[path = "http/lab.rs"]
mod lab;
#[cfg(feature = "postgres")]
#[path = "http/postgres.rs"]
mod postgres;
#[path = "http/refusals.rs"]
mod refusals;
