//! Files that claim much and hold little: each is refused by name, and on Linux the memory that this takes is measured.
//! One test, because the measure is that of a process.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::{Cursor, Write as _};

use device::dump::{ReadOptions, read};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// Memory that a refusal may take.
const MOST: u64 = 64 << 20;

fn zipped(members: &[(&str, &[u8])], method: CompressionMethod) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in members {
        zip.start_file(*name, SimpleFileOptions::default().compression_method(method)).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

fn pt(pickle: &[u8]) -> Vec<u8> {
    let members: [(&str, &[u8]); 2] = [("a/data.pkl", pickle), ("a/data/0", &[0; 24])];
    zipped(&members, CompressionMethod::Stored)
}

/// The pickle of an FP32 tensor whose sizes and strides are these bytes of operations.
fn tensor(elements: &[u8], sizes: &[u8], strides: &[u8]) -> Vec<u8> {
    let begin = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu";
    let end = b"\x89ccollections\nOrderedDict\n)RtR.";
    [begin, elements, b"tQK\0(", sizes, b"t(", strides, b"t", end].concat()
}

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn npy(shape: &str, data: usize) -> Vec<u8> {
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// Highest memory of this process so far, and from now on anew.
fn high_water() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    let _ = fs::write("/proc/self/clear_refs", "5");
    kilobytes.unwrap_or(0) << 10
}

#[test]
fn claims_are_refused_before_memory_is_taken_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let marker = dir.path().join("marker");
    let mut calling = vec![0x80, 2];
    calling.extend(b"cbuiltins\nopen\n(X");
    calling.extend((marker.to_str().unwrap().len() as u32).to_le_bytes());
    calling.extend(marker.to_str().unwrap().as_bytes());
    calling.extend(b"X\x01\0\0\0wtR.");
    let entry = |shape: &str, offsets: &str| format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}"#);
    let one = |shape: &str, offsets: &str| safetensors(&format!(r#"{{"x":{}}}"#, entry(shape, offsets)), 8);
    let two = |first: &str, second: &str, data| {
        let (x, y) = (entry("[2]", first), entry("[2]", second));
        safetensors(&format!(r#"{{"x":{x},"y":{y}}}"#), data)
    };
    let mut large_member = pt(&tensor(b"K\x06", b"K\x02", b"K\x01"));
    let directory = large_member.windows(8).rposition(|window| window == b"a/data/0").unwrap() - 46;
    large_member[directory + 20..directory + 28].copy_from_slice(&[0, 0, 0, 0x7F, 0, 0, 0, 0x7F]);
    let million = b"J\x40\x42\x0F\0";
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("length.safetensors", (u64::MAX - 3).to_le_bytes().to_vec(), "header length is 18446744073709551612"),
        ("half.safetensors", (1u64 << 63).to_le_bytes().to_vec(), "header length is 9223372036854775808"),
        ("product.safetensors", one("[4294967296,4294967296]", "[0,8]"), "product of shape"),
        ("overlap.safetensors", two("[0,8]", "[4,12]", 12), "inside tensor `x`"),
        ("hole.safetensors", two("[0,8]", "[12,20]", 20), "hole after byte 8"),
        ("shape.safetensors", one("[3]", "[0,8]"), "takes 12 bytes"),
        ("twice.safetensors", safetensors(&format!(r#"{{"x":{0},"x":{0}}}"#, entry("[2]", "[0,8]")), 8), "`x` twice"),
        ("brackets.safetensors", safetensors(&"[".repeat(200_000), 0), "not what safetensors prescribes"),
        ("claims.npy", npy("(1000000000000,)", 16), "takes 4000000000000 bytes"),
        ("product.npy", npy("(4294967296, 4294967296)", 16), "product of shape"),
        ("call.pt", pt(&calling), "`builtins.open`"),
        (
            "two.pt",
            zipped(&[("a/data.pkl", b"\x80\x02N."), ("b/data.pkl", &calling)], CompressionMethod::Stored),
            "more than one pickle, `a/data.pkl` and `b/data.pkl`",
        ),
        ("member.pt", large_member, "`a/data/0` is 2130706432 bytes long"),
        ("storage.pt", pt(&tensor(b"J\0\0\0\x7F", b"K\x02", b"K\x01")), "declared with 2130706432 elements"),
        ("memo.pt", pt(b"\x80\x02Nr\xFF\xFF\xFF\xFF."), "stores memo 4294967295"),
        (
            "deep.pt",
            pt(&[&b"\x80\x02"[..], &b"]".repeat(200_000), &b"a".repeat(199_999), b"."].concat()),
            "in one another",
        ),
        ("expanded.pt", pt(&tensor(b"K\x06", &million.repeat(2), b"K\0K\0")), "more than"),
        ("marks.pt", pt(&[&b"\x80\x02"[..], &b"(".repeat(8 << 20)].concat()), "values at once"),
        ("lists.pt", pt(&[&b"\x80\x02"[..], &b"]".repeat(8 << 20)].concat()), "more than 262144 values"),
        ("dicts.pt", pt(&[&b"\x80\x02("[..], &b"}NNs".repeat(1 << 20)].concat()), "more than 262144 values"),
        ("long.pt", pt(&[&b"\x80\x02]"[..], &b"Na".repeat(6 << 20)].concat()), "values in lists and dicts"),
        ("old.pt", [&b"\x80\x02"[..], &b"(".repeat(8 << 20)].concat(), "values at once"),
        ("bomb.pt", zipped(&[("data.pkl", &vec![b'N'; 256 << 20])], CompressionMethod::Deflated), "at most 16777216"),
        ("bomb.npz", zipped(&[("x.npy", &vec![0; 256 << 20])], CompressionMethod::Deflated), "more than"),
    ];
    for (name, bytes, _) in &cases {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let cases: Vec<(&str, &str)> = cases.into_iter().map(|(name, _, said)| (name, said)).collect();
    // What the files were made of is given back, and one refusal before the measure loads what all of them use.
    let _ = read(&dir.path().join("claims.npy"), &ReadOptions::default());
    high_water();
    let before = high_water();
    for (name, said) in cases {
        let error = read(&dir.path().join(name), &ReadOptions::default()).unwrap_err().to_string();
        let taken = high_water().saturating_sub(before);
        assert!(error.contains(name) && error.contains(said), "{error} lacks {said}");
        assert!(taken < MOST, "{name}: refused with {taken} bytes of memory");
    }
    assert!(!marker.exists(), "a pickle was run");
}
