//! Dumps as their own tools wrote them: every sample of `tests/samples` reads with the hash that its writer recorded, and
//! those that must be refused are, by name.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use device::dump::{self, NamedArray, ReadOptions};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

#[derive(Deserialize)]
struct Manifest {
    files: Vec<Sample>,
}

#[derive(Deserialize)]
struct Sample {
    file: String,
    name: Option<String>,
    dtype: Option<String>,
    descr: Option<String>,
    shape: Option<Vec<usize>>,
    sha256: Option<String>,
}

fn samples(kind: &str) -> (PathBuf, BTreeMap<String, Vec<Sample>>) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("samples").join(kind);
    let manifest: Manifest = serde_json::from_slice(&fs::read(dir.join("manifest.json")).unwrap()).unwrap();
    let mut files: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
    for sample in manifest.files {
        files.entry(sample.file.clone()).or_default().push(sample);
    }
    (dir, files)
}

fn hash(named: &NamedArray) -> String {
    Sha256::digest(&named.array.bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What NumPy calls a type, in the names of safetensors.
fn of_descr(descr: &str) -> &str {
    match descr.trim_start_matches(['<', '>', '|']) {
        "f4" => "F32",
        "f8" => "F64",
        "f2" => "F16",
        "i1" => "I8",
        "i2" => "I16",
        "i4" => "I32",
        "i8" => "I64",
        "u1" => "U8",
        "b1" => "BOOL",
        _ => "BF16",
    }
}

#[test]
fn every_sample_reads_with_the_hash_of_its_writer() {
    let mut read = 0;
    for kind in ["pt", "npy"] {
        let (dir, files) = samples(kind);
        let names = fs::read_dir(&dir).unwrap().count();
        assert_eq!(names, files.len() + 1, "a file of {} is in no manifest", dir.display());
        for (file, expected) in files.iter().filter(|(file, _)| !file.starts_with("refuse.")) {
            let options = ReadOptions { bf16: file.contains("bf16") && kind == "npy" };
            let dump = dump::read(&dir.join(file), &options).unwrap();
            assert_eq!(dump.arrays.len(), expected.len(), "{file}");
            assert_eq!(dump.bare, expected.iter().all(|sample| sample.name.is_none()), "{file}");
            for sample in expected {
                let stem = Path::new(file).file_stem().unwrap().to_str().unwrap();
                let name = sample.name.as_deref().unwrap_or(stem);
                let array = dump.arrays.iter().find(|array| array.name == name);
                let array = array.unwrap_or_else(|| panic!("{file} has no {name}"));
                let dtype = sample.dtype.as_deref().or(sample.descr.as_deref().map(of_descr)).unwrap();
                assert_eq!(array.array.dtype.to_string(), dtype, "{file} {name}");
                assert_eq!(Some(&array.array.shape), sample.shape.as_ref(), "{file} {name}");
                assert_eq!(Some(hash(array)), sample.sha256, "{file} {name}");
                read += 1;
            }
        }
    }
    assert!(read > 90, "{read} tensors were compared");
}

#[test]
fn samples_to_refuse_are_refused_by_name() {
    for (file, said) in [
        ("pt/refuse.callable.pt", "`__builtin__.print`"),
        ("pt/refuse.truncated.pt", "cut short"),
        ("npy/refuse.object.npy", "descr is \"|O\""),
        ("npy/refuse.structured.npy", "descr is a structure of fields"),
        ("npy/refuse.truncated.npy", "cut short"),
        ("npy/bf16_ml_dtypes.npy", "--bf16"),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("samples").join(file);
        let error = dump::read(&path, &ReadOptions::default()).unwrap_err().to_string();
        assert!(error.contains(said) && error.contains(file), "{error}");
    }
    let listed = ["pt", "npy"].map(|kind| samples(kind).1.keys().filter(|file| file.starts_with("refuse.")).count());
    assert_eq!(listed, [2, 3]);
}
