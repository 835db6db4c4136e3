//! The conformance cases of the example `own_backend`, which has them beside its code.

#[path = "../examples/own_backend.rs"]
#[expect(dead_code, reason = "its main is run as a program")]
mod own_backend;
