//! The redis engine passes every case on a private server, and keeps its promises under faults.

#[path = "redis/conformance.rs"]
mod conformance;
#[path = "redis/faults.rs"]
mod faults;
#[path = "redis/lab.rs"]
mod lab;
