//! What the fuzzer once found, run again: every file of `tests/corpus` goes through the reader that its folder names.

use std::fs;
use std::path::Path;
use std::time::Instant;

use assay_tests::Mutations;
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

/// Files changed at random, some hundred for each reader, or as many as `ASSAY_MUTATIONS` says. A failure prints the file.
#[test]
fn changed_files_end_in_a_value_or_an_error() {
    let asked = std::env::var("ASSAY_MUTATIONS").ok().and_then(|count| count.parse().ok());
    let only = std::env::var("ASSAY_TARGET").unwrap_or_default();
    for (name, target) in TARGETS.iter().filter(|(name, _)| only.is_empty() || *name == only) {
        let mut mutations = Mutations::of(name, 0x9E37_79B9_7F4A_7C15);
        let (started, count) = (Instant::now(), asked.unwrap_or(300));
        let mut slowest = 0f64;
        for number in 0..count {
            let file = mutations.file();
            let begun = Instant::now();
            if std::panic::catch_unwind(|| target(&file)).is_err() {
                panic!("{name}, file {number}: {file:?}");
            }
            slowest = slowest.max(begun.elapsed().as_secs_f64());
        }
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let memory = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default();
        let seconds = started.elapsed().as_secs_f64();
        println!("{name}: {count} files in {seconds:.1} s, slowest {:.1} ms, {memory}", 1000.0 * slowest);
    }
}
