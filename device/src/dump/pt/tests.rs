//! Archives and old files that lie about their storages, and what is written.

use std::io::{Cursor, Write as _};

use proptest::prelude::*;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::*;
use crate::dump::{Array, Dump, ReadOptions, open_bytes};

/// An archive of these members, as they are given.
fn zipped(members: &[(&str, &[u8])], method: CompressionMethod) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in members {
        zip.start_file(*name, SimpleFileOptions::default().compression_method(method)).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

fn stored(members: &[(&str, &[u8])]) -> Vec<u8> {
    zipped(members, CompressionMethod::Stored)
}

/// The pickle of one FP32 tensor of storage 0 with so many elements.
fn pickle(elements: u8, offset: u8, shape: &[u8], strides: &[u8]) -> Vec<u8> {
    let sizes =
        |sizes: &[u8]| [b"(".to_vec(), sizes.iter().flat_map(|&size| [b'K', size]).collect(), b"t".to_vec()].concat();
    [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu".to_vec(),
        vec![b'K', elements, b't', b'Q', b'K', offset],
        sizes(shape),
        sizes(strides),
        b"\x89ccollections\nOrderedDict\n)RtR.".to_vec(),
    ]
    .concat()
}

fn archive_of(pickle: &[u8], storage: &[u8]) -> Vec<u8> {
    stored(&[("a/data.pkl", pickle), ("a/data/0", storage), ("a/version", b"3\n")])
}

fn open(bytes: Vec<u8>) -> Result<Dump, String> {
    let opened = open_bytes(bytes, "x.pt", &ReadOptions::default()).map_err(|error| error.to_string())?;
    Ok(opened.into_dump())
}

#[test]
fn views_are_read_through_their_strides() {
    let storage: Vec<u8> = (0..24).collect();
    let whole = open(archive_of(&pickle(6, 0, &[2, 3], &[3, 1]), &storage)).unwrap();
    assert!(whole.bare && whole.format == Format::PtZip && whole.arrays[0].name == "x");
    assert_eq!(whole.arrays[0].array.bytes, storage);
    let transposed = open(archive_of(&pickle(6, 0, &[3, 2], &[1, 3]), &storage)).unwrap();
    assert_eq!(transposed.arrays[0].array.bytes[..8], [0, 1, 2, 3, 12, 13, 14, 15]);
    let expanded = open(archive_of(&pickle(6, 5, &[200, 2], &[0, 0]), &storage)).unwrap();
    assert_eq!(expanded.arrays[0].array.bytes, [20, 21, 22, 23].repeat(400));
    let inflated =
        zipped(&[("data.pkl", &pickle(6, 1, &[5], &[1])), ("data/0", &storage)], CompressionMethod::Deflated);
    assert_eq!(open(inflated).unwrap().arrays[0].array.bytes, storage[4..]);
    let big = stored(&[("a/data.pkl", &pickle(6, 5, &[1], &[1])), ("a/data/0", &storage), ("a/byteorder", b"big")]);
    assert_eq!(open(big).unwrap().arrays[0].array.bytes, [23, 22, 21, 20]);
}

#[test]
fn lies_about_storages_are_refused_by_name() {
    let storage = [0u8; 24];
    for (bytes, said) in [
        (
            archive_of(&pickle(7, 0, &[2], &[1]), &storage),
            "storage `0`: is declared with 7 elements of F32, 28 bytes, but its member holds 24",
        ),
        (archive_of(&pickle(5, 0, &[2], &[1]), &storage), "20 bytes, but its member holds 24"),
        (archive_of(&pickle(6, 0, &[2, 4], &[4, 1]), &storage), "lead beyond its storage of 6 elements"),
        (archive_of(&pickle(6, 6, &[1], &[1]), &storage), "lead beyond"),
        (archive_of(&pickle(6, 0, &[2, 3], &[1]), &storage), "lead beyond"),
        (archive_of(&pickle(6, 0, &[255; 64], &[0; 64]), &storage), "overflows"),
        (archive_of(&pickle(6, 0, &[255, 255, 255], &[0; 3]), &storage), "more than 335"),
        (archive_of(&pickle(6, 0, &[1; 65], &[0; 65]), &storage), "has 65 dimensions"),
        (stored(&[("a/data.pkl", &pickle(6, 0, &[2], &[1]))]), "storage `0`: is no member"),
        (
            stored(&[("a/data.pkl", b"\x80\x02N."), ("a/constants.pkl", b"\x80\x02N.")]),
            "`a/data.pkl` and `a/constants.pkl`",
        ),
        (stored(&[("a/other.pkl", b"\x80\x02N.")]), "expected the one named data.pkl"),
        (stored(&[("a/data.pkl", b"\x80\x02N.N")]), "1 bytes are left"),
        (
            stored(&[("a/data.pkl", &pickle(6, 0, &[2], &[1])), ("a/data/0", &storage), ("a/byteorder", b"pdp")]),
            "pdp-endian",
        ),
        (stored(&[("a/x.txt", b"")]), "begins with `a/x.txt`"),
        (zipped(&[("data.pkl", &vec![b'N'; 17 << 20])], CompressionMethod::Deflated), "at most 16777216 are read"),
        (zipped(&[("x.npy", &vec![0; 80 << 20])], CompressionMethod::Deflated), "more than"),
        (
            [b"\x80\x02}.", archive_of(&pickle(6, 0, &[2], &[1]), &storage).as_slice()].concat(),
            "torch.save did not write",
        ),
    ] {
        let error = open(bytes).unwrap_err();
        assert!(error.contains(said) && error.starts_with("x.pt: "), "{error} lacks {said}");
    }
}

#[test]
fn archives_that_two_readers_would_read_differently_are_refused() {
    let good = archive_of(&pickle(6, 0, &[2], &[1]), &[0; 24]);
    let at = |needle: &[u8]| good.windows(needle.len()).rposition(|window| window == needle).unwrap();
    // A member that claims more than the file holds, in the archive's directory.
    let mut large = good.clone();
    let directory = at(b"a/data/0") - 46;
    large[directory + 20..directory + 28].copy_from_slice(&[0xFF, 0xFF, 0xFF, 0x7F, 0xFF, 0xFF, 0xFF, 0x7F]);
    let error = open(large).unwrap_err();
    assert!(error.contains("a/data/0") && error.contains("leads beyond the file"), "{error}");
    // Two members of one name: the last is renamed to the first.
    let twins = stored(&[("a/data.pkl", b"\x80\x02N."), ("b/data.pkl", b"\x80\x02N.")]);
    let twins: Vec<u8> = twins
        .iter()
        .enumerate()
        .map(|(place, &byte)| match byte {
            b'b' if twins[place..].starts_with(b"b/data.pkl") => b'a',
            byte => byte,
        })
        .collect();
    assert!(open(twins).unwrap_err().contains("two of its members have one name"));
    // A changed byte, and the same with a checksum that its writer did not compute.
    let mut changed = good.clone();
    let data = changed.windows(24).position(|window| window == [0; 24]).unwrap();
    changed[data + 5] = 1;
    let error = open(changed.clone()).unwrap_err();
    assert!(error.contains("`a/data/0`") && error.contains("checksum"), "{error}");
    changed[directory + 16..directory + 20].fill(0);
    assert_eq!(open(changed).unwrap().arrays[0].array.bytes[5], 1);
    let cut = open(good[..good.len() / 2].to_vec()).unwrap_err();
    assert!(cut.contains("cut short"), "{cut}");
}

#[test]
fn nesting_cycles_and_explosions_end() {
    let of = |body: &[u8]| stored(&[("data.pkl", &[b"\x80\x02", body, b"."].concat())]);
    let deep = [vec![b']'; 100], vec![b'a'; 99]].concat();
    assert!(open(of(&deep)).unwrap_err().contains("more than 64 dicts and lists in one another"));
    assert!(open(of(b"]q\x00h\x00a")).unwrap_err().contains("more than 64"));
    // Every list holds the one before it a hundred times.
    let mut body = b"]q\x00Na".to_vec();
    for level in 1..20u8 {
        body = [b"]q".as_slice(), &[level], b"(", &body, &[b'h', level - 1].repeat(99), b"e"].concat();
    }
    let body: Vec<u8> = body;
    let error = open(of(&body)).unwrap_err();
    assert!(error.contains("more than") || error.contains("memo"), "{error}");
    let long = [b"}q\x00".as_slice(), b"X\0\x04\0\0", &[b'k'; 1024], b"Ns"].concat();
    assert!(open(of(&long)).unwrap_err().contains("more than 512 bytes of names"));
    let twice = open(of(b"}(X\x01\0\0\0aNX\x01\0\0\0aNu")).unwrap();
    assert_eq!(twice.remarks, ["2 values are no tensors: a, a"]);
}

#[test]
fn lazily_conjugated_tensors_and_hooks_are_refused() {
    let plain = pickle(6, 0, &[2], &[1]);
    let cut = plain.len() - 3;
    let with = |more: &[u8]| archive_of(&[&plain[..cut], more, b"tR."].concat(), &[0; 24]);
    assert!(open(with(b"}")).is_ok() && open(with(b"N")).is_ok());
    assert!(open(with(b"}X\x04\0\0\0conj\x88s")).unwrap_err().contains("lazy view"));
}

#[test]
fn what_is_written_has_its_storage_aligned() {
    let array = Array { dtype: Dtype::BF16, shape: vec![16, 300], bytes: vec![0xA5; 9600] };
    let bytes = encode(&array).unwrap();
    assert_eq!(bytes.windows(100).position(|window| window == [0xA5; 100]).unwrap() % 64, 0);
    assert_eq!(bytes, encode(&array).unwrap());
    let unknown = Array { dtype: Dtype::F4, shape: vec![2], bytes: vec![0] };
    assert!(encode(&unknown).unwrap_err().to_string().contains("cannot be written as .pt"));
}

const TYPES: [Dtype; 19] = [
    Dtype::BOOL,
    Dtype::U8,
    Dtype::I8,
    Dtype::U16,
    Dtype::I16,
    Dtype::U32,
    Dtype::I32,
    Dtype::U64,
    Dtype::I64,
    Dtype::F16,
    Dtype::BF16,
    Dtype::F32,
    Dtype::F64,
    Dtype::C64,
    Dtype::F8_E4M3,
    Dtype::F8_E5M2,
    Dtype::F8_E8M0,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
];

proptest! {
    #[test]
    fn what_is_written_is_read(shape in prop::collection::vec(0usize..5, 0..5), kind in 0usize..19, seed: u8) {
        let dtype = TYPES[kind];
        let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let bytes: Vec<u8> = (0..length).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        let array = Array { dtype, shape, bytes };
        let dump = open(encode(&array).unwrap()).unwrap();
        prop_assert!(dump.bare);
        prop_assert_eq!(&dump.arrays[0].array, &array);
    }

    #[test]
    fn changed_archives_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5)) {
        let mut bytes = archive_of(&pickle(6, 1, &[2, 2], &[2, 1]), &[7; 24]);
        for (index, value) in changes {
            let length = bytes.len();
            bytes[index.index(length)] = value;
        }
        let _ = open(bytes);
    }
}
