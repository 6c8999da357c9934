//! The map of a user: which tensor each entry of a dump is.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// Longest map read: a few lines for each of many thousand entries.
const LONGEST: u64 = 1 << 20;

/// Reads a YAML file `{entry: tensor}`.
///
/// # Errors
/// The file cannot be read, is too long, or is no mapping of text to text in which each entry stands once.
pub fn read_map(path: &Path) -> Result<BTreeMap<String, String>, String> {
    let failed = |what: String| format!("{}: {what}", path.display());
    // Asked before opening: opening a pipe waits for its writer.
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(failed("is not a regular file".to_owned()));
    }
    let mut text = String::new();
    let file = File::open(path).map_err(|error| failed(error.to_string()))?;
    let read = file.take(LONGEST + 1).read_to_string(&mut text).map_err(|error| failed(error.to_string()))?;
    if read as u64 > LONGEST {
        return Err(failed(format!("is longer than {LONGEST} bytes; expected lines such as `args.3: out`")));
    }
    serde_yaml::from_str(&text).map_err(|error| {
        failed(format!("{error}; expected entries of the dump with their tensors, such as `args.3: out`"))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(text: &[u8]) -> Result<BTreeMap<String, String>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("map.yaml");
        std::fs::write(&path, text).unwrap();
        read_map(&path)
    }

    #[test]
    fn maps_are_read_and_what_is_none_is_refused() {
        let map = read(b"args.3: out\n\"0x1.f2.a0\": k_cache\n").unwrap();
        assert_eq!(map["0x1.f2.a0"], "k_cache");
        for text in ["a: [1, 2]", "- a\n- b\n", "a: b\na: c\n", "{", &"# \n".repeat(1 << 19)] {
            let error = read(text.as_bytes()).unwrap_err();
            assert!(error.contains("map.yaml"), "{error}");
        }
        assert!(read(&[0xff, 0xfe]).is_err());
    }

    proptest! {
        #[test]
        fn no_text_is_too_strange(text in "\\PC*") {
            let _ = read(text.as_bytes());
        }
    }
}
