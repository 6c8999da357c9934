//! Headers as NumPy writes them and as nobody should.

use proptest::prelude::*;

use super::*;
use crate::dump::{NamedArray, open_bytes};

fn file(version: [u8; 2], header: &str, data: usize) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(version);
    if version[0] == 1 {
        bytes.extend((header.len() as u16).to_le_bytes());
    } else {
        bytes.extend((header.len() as u32).to_le_bytes());
    }
    bytes.extend(header.as_bytes());
    bytes.extend((0..data).map(|at| at as u8));
    bytes
}

fn read(bytes: Vec<u8>, bf16: bool) -> Result<NamedArray, String> {
    let opened = open_bytes(bytes, "x.npy", &ReadOptions { bf16 }).map_err(|error| error.to_string())?;
    Ok(opened.into_dump().arrays.remove(0))
}

fn header(descr: &str, fortran: &str, shape: &str) -> String {
    format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}\n")
}

#[test]
fn orders_of_bytes_and_of_elements_become_one() {
    let rows = read(file([1, 0], &header("<i2", "False", "(2, 3)"), 12), false).unwrap();
    assert_eq!(rows.array.bytes, (0..12).collect::<Vec<u8>>());
    assert_eq!((rows.name.as_str(), rows.array.dtype), ("x", Dtype::I16));
    let columns = read(file([3, 0], &header("<i2", "True", "(2, 3)"), 12), false).unwrap();
    assert_eq!(columns.array.bytes, [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]);
    let swapped = read(file([2, 0], &header(">i2", "False", "(2, 3)"), 12), false).unwrap();
    assert_eq!(swapped.array.bytes, [1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10]);
    let complex = read(file([1, 0], &header(">c8", "False", "()"), 8), false).unwrap();
    assert_eq!(complex.array.bytes, [3, 2, 1, 0, 7, 6, 5, 4]);
    let old = read(file([1, 0], "{\"descr\":'|u1','fortran_order':False,'shape':(3L,)}", 3), false).unwrap();
    assert_eq!(old.array.shape, [3]);
}

#[test]
fn bf16_is_read_where_it_is_said_and_never_guessed() {
    let one = |descr| file([1, 0], &header(descr, "False", "(1,)"), 2);
    let refused = read(one("<V2"), false).unwrap_err();
    assert!(refused.contains("x.npy") && refused.contains("--bf16"), "{refused}");
    for descr in ["<V2", "|V2", "<u2"] {
        assert_eq!(read(one(descr), true).unwrap().array.dtype, Dtype::BF16);
    }
    assert_eq!(read(one("<u2"), false).unwrap().array.dtype, Dtype::U16);
    assert!(read(one(">V2"), true).unwrap_err().contains("descr is '>V2'"));
}

#[test]
fn what_is_no_plain_array_is_refused_by_field() {
    let plain = header("<f4", "False", "(2,)");
    for (bytes, said) in [
        (file([1, 0], &plain, 7), "takes 8 bytes, but the file holds 7 for it; it is cut short"),
        (file([1, 0], &plain, 9), "takes 8 bytes, but the file holds 9 for it; something was appended"),
        (file([1, 0], &header("<f4", "False", "(1000000000000,)"), 16), "takes 4000000000000 bytes"),
        (file([1, 0], &header("<f4", "False", "(4294967296, 4294967296)"), 16), "product of shape"),
        (file([1, 0], &header("<f4", "False", "(18446744073709551616,)"), 16), "expected whole numbers below 2^64"),
        (file([1, 0], &header("<f4", "False", "(-1,)"), 4), "expected"),
        (file([1, 0], &header("<f4", "False", &format!("({})", "1,".repeat(65))), 4), "has 65 dimensions"),
        (file([1, 0], &header("|O", "False", "(2,)"), 8), "descr is \"|O\""),
        (file([1, 0], &header("<f16", "False", "(2,)"), 32), "expected a plain number type"),
        (file([1, 0], "{'descr': [('x', '<f4')], }", 8), "structure of fields"),
        (file([1, 0], &header("<f4", "Maybe", "(2,)"), 8), "neither True nor False"),
        (file([1, 0], "{'descr': '<f4', 'descr': '<f4'}", 8), "key \"descr\" twice"),
        (file([1, 0], "{'descr': '<f4', 'shape': (2,)}", 8), "lacks fortran_order"),
        (file([1, 0], "{'descr': '<f4', 'order': 1}", 8), "has key \"order\""),
        (file([1, 0], &format!("{} x", plain.trim()), 8), "something behind the dict"),
        (file([4, 0], &plain, 8), "version 4.0"),
        (file([2, 0], &" ".repeat(1 << 17), 8), "header length is 131072"),
        (file([1, 0], &plain, 8)[..30].to_vec(), "cut short"),
        (MAGIC.to_vec(), "cut short"),
    ] {
        let error = read(bytes, false).unwrap_err();
        assert!(error.contains(said) && error.starts_with("x.npy: "), "{error} lacks {said}");
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read(shape in prop::collection::vec(0usize..5, 0..5), kind in 0usize..14, seed: u8) {
        let types = [
            Dtype::BOOL, Dtype::U8, Dtype::I8, Dtype::U16, Dtype::I16, Dtype::U32, Dtype::I32, Dtype::U64, Dtype::I64,
            Dtype::F16, Dtype::BF16, Dtype::F32, Dtype::F64, Dtype::C64,
        ];
        let dtype = types[kind];
        let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let bytes: Vec<u8> = (0..length).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        let array = Array { dtype, shape, bytes };
        let mut file = encode_header(&array).unwrap();
        prop_assert_eq!(file.len() % 64, 0);
        file.extend(&array.bytes);
        // 16-bit integers stay what they are as long as nobody says otherwise.
        prop_assert_eq!(read(file, dtype == Dtype::BF16).unwrap().array, array);
    }

    #[test]
    fn changed_headers_never_panic(changes in prop::collection::vec((0usize..140, any::<u8>()), 1..6)) {
        let mut bytes = file([1, 0], &header("<f4", "True", "(2, 3)"), 24);
        for (at, value) in changes {
            let length = bytes.len();
            bytes[at % length] = value;
        }
        let _ = read(bytes, false);
    }

    #[test]
    fn a_cut_file_is_refused(cut in 0usize..90) {
        let mut bytes = file([1, 0], &header("<f4", "True", "(2, 3)"), 24);
        prop_assert!(cut < bytes.len());
        bytes.truncate(cut);
        prop_assert!(read(bytes, false).is_err());
    }
}
