//! What is done with hostile bytes: one function for each reader of files that others write. The fuzzer of `fuzz/` runs
//! them on bytes that it makes up, and a test on what it once found.

use std::io::{Cursor, Write as _};
use std::path::Path;

use cases::Case;
use cases::header::Header;
use device::dump::{self, DumpError, Opened, ReadOptions};
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

/// Most bytes of tensors that are read after a file was opened: views of one storage may hold much more than the file,
/// and copying them finds nothing.
const READ: usize = 1 << 16;

/// Reads hostile bytes.
pub type Target = fn(&[u8]);

/// The readers, by the names of their fuzz targets.
pub const TARGETS: &[(&str, Target)] = &[
    ("pt_zip", pt_zip),
    ("pt_pickle", pt_pickle),
    ("pt_legacy", pt_legacy),
    ("npy", npy),
    ("npz", npz),
    ("safetensors", safetensors),
    ("args_dump", args_dump),
    ("case_yaml", case_yaml),
    #[cfg(feature = "goldens")]
    ("golden_tokens", golden_tokens),
];

/// Runs a reader by its name.
///
/// # Panics
/// There is no such reader; or the reader is wrong.
pub fn run(target: &str, bytes: &[u8]) {
    match TARGETS.iter().find(|(name, _)| *name == target) {
        Some((_, run)) => run(bytes),
        None => panic!("no target is named {target}"),
    }
}

/// What is read is what its shape says, and what is refused says why.
fn check(opened: Result<Opened, DumpError>) {
    match opened {
        Ok(opened) => {
            let mut left = READ;
            for tensor in &opened.tensors {
                let elements: usize = tensor.shape.iter().product();
                assert_eq!(tensor.length(), elements * tensor.dtype.bitsize() / 8);
                if let Some(less) = left.checked_sub(tensor.length()) {
                    left = less;
                    assert_eq!(opened.bytes(tensor).len(), tensor.length());
                }
            }
        }
        Err(error) => assert!(error.to_string().len() < 4000, "{error}"),
    }
}

fn file(bytes: &[u8], name: &str, bf16: bool) {
    check(dump::open_bytes(bytes.to_vec(), name, &ReadOptions { bf16 }));
}

fn pt_zip(bytes: &[u8]) {
    file(bytes, "a.pt", false);
}

/// A pickle in an archive that is right, beside storages that it may use.
fn pt_pickle(bytes: &[u8]) {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let stored = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (name, content) in
        [("a/data.pkl", bytes), ("a/data/0", &[1; 60]), ("a/data/1", &[2; 28]), ("a/data/2", &[3; 1])]
    {
        if zip.start_file(name, stored).is_err() || zip.write_all(content).is_err() {
            return;
        }
    }
    if let Ok(archive) = zip.finish() {
        file(archive.get_ref(), "a.pt", false);
    }
}

fn pt_legacy(bytes: &[u8]) {
    file(bytes, "a.pt", false);
}

fn npy(bytes: &[u8]) {
    file(bytes, "a.npy", bytes.len().is_multiple_of(2));
}

fn npz(bytes: &[u8]) {
    file(bytes, "a.npz", bytes.len().is_multiple_of(2));
}

fn safetensors(bytes: &[u8]) {
    file(bytes, "a.safetensors", false);
    let ours = Header::read(bytes, bytes.len() as u64);
    // Whatever this reader takes, the format's own takes too.
    if ours.is_ok() {
        assert!(safetensors::SafeTensors::read_metadata(bytes).is_ok());
    }
}

fn args_dump(bytes: &[u8]) {
    check(dump::open_argument_bytes(bytes, Some(vec![7; 256])));
}

fn case_yaml(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match Case::parse(text, Path::new("case.yaml")) {
        Ok(case) => {
            let again = case.to_yaml();
            if let Err(error) = Case::parse(&again, Path::new("case.yaml")) {
                panic!("a case that was read is not read again: {error}\n{again}");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[cfg(feature = "goldens")]
fn golden_tokens(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match goldens::tokens::Golden::parse(text, Path::new("golden.yaml")) {
        Ok(golden) => {
            let again = golden.to_yaml();
            if let Err(error) = goldens::tokens::Golden::parse(&again, Path::new("golden.yaml")) {
                panic!("a golden that was read is not read again: {error}\n{again}");
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    // Dumps of tokens come as text of several kinds.
    let _ = goldens::tokens::Dump::parse(text);
}
