#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fencelock::fuzzing::run("postgres_rows", bytes));
