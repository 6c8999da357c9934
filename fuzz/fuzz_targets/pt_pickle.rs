#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| assay_tests::targets::run("pt_pickle", bytes));
