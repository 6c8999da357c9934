#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| assay_fuzz::targets::run("golden_tokens", bytes));
