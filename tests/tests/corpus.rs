//! What the fuzzer once found, run again: every file of `tests/corpus` goes through the reader that its folder names.

use std::fs;
use std::path::Path;

use assay_tests::targets::{TARGETS, run};

#[test]
fn what_was_found_ends_in_a_value_or_an_error() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let mut files = 0;
    for folder in fs::read_dir(&corpus).unwrap() {
        let folder = folder.unwrap();
        let target = folder.file_name().into_string().unwrap();
        assert!(TARGETS.iter().any(|(name, _)| *name == target), "tests/corpus/{target} is of no reader");
        for file in fs::read_dir(folder.path()).unwrap() {
            run(&target, &fs::read(file.unwrap().path()).unwrap());
            files += 1;
        }
    }
    assert!(files >= TARGETS.len(), "{files} files");
}

#[test]
fn every_reader_has_a_fuzz_target() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz");
    let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
    for (name, _) in TARGETS {
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        let text = fs::read_to_string(fuzz.join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(text.contains(&format!("run(\"{name}\"")), "{name}");
    }
}
