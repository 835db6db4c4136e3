#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fencelock::fuzzing::run("mysql_rows", bytes));
