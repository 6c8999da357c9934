//! Formats told apart, directories, and round trips through files.

use std::fs;

use proptest::prelude::*;

use super::*;

fn array(dtype: Dtype, shape: &[usize], first: u8) -> Array {
    let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    Array { dtype, shape: shape.to_vec(), bytes: (0..length).map(|at| (at as u8).wrapping_add(first)).collect() }
}

fn named(name: &str, array: Array) -> NamedArray {
    NamedArray { name: name.to_owned(), array }
}

fn plain(path: &Path) -> Result<Dump, String> {
    read(path, &ReadOptions::default()).map_err(|error| error.to_string())
}

#[test]
fn formats_are_told_by_content() {
    let dir = tempfile::tempdir().unwrap();
    let one = array(Dtype::I32, &[2, 3], 1);
    type Write = fn(&Path, &Array) -> Result<(), DumpError>;
    let writers: [(Write, Format); 2] = [(write_npy, Format::Npy), (write_pt, Format::PtZip)];
    for (write, format) in writers {
        let path = dir.path().join("anything.bin");
        write(&path, &one).unwrap();
        let dump = plain(&path).unwrap();
        assert_eq!((dump.format, dump.bare), (format, true));
        assert_eq!(dump.arrays, [named("anything", one.clone())]);
    }
    // A header whose length begins with the bytes of a pickle, or with that of JSON.
    for length in [0x0280usize, 0x047B, 0x0420] {
        let path = dir.path().join("weights");
        let padding = length - 58;
        let name = "n".repeat(padding);
        let header = format!(r#"{{"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.push(9);
        fs::write(&path, bytes).unwrap();
        let dump = plain(&path).unwrap();
        assert_eq!((dump.format, dump.arrays[0].name.len()), (Format::Safetensors, padding));
    }
}

#[test]
fn what_is_no_dump_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.pt");
    for (bytes, said) in [
        (&b""[..], "0 bytes long"),
        (b"hello, this is no dump", "no dump of a known format"),
        (b"{\"a\": 1}", "no dump of a known format"),
        (b"\x80\x02N.", "torch.save did not write"),
        (b"PK\x03\x04", "cut short"),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = plain(&path).unwrap_err();
        assert!(error.contains("a.pt: ") && error.contains(said), "{error}");
    }
    fs::write(dir.path().join("b.safetensors"), b"short").unwrap();
    assert!(plain(&dir.path().join("b.safetensors")).unwrap_err().contains("cut short"));
    assert!(plain(&dir.path().join("none")).unwrap_err().contains("none"));
    let empty = tempfile::tempdir().unwrap();
    assert!(plain(empty.path()).unwrap_err().contains("directory holds no dump"));
}

#[test]
fn a_directory_of_files_is_one_dump() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("out")).unwrap();
    write_pt(&dir.path().join("out/attn_out.pt"), &array(Dtype::BF16, &[4], 1)).unwrap();
    write_npy(&dir.path().join("q.npy"), &array(Dtype::F32, &[], 2)).unwrap();
    let some = [named("a", array(Dtype::I8, &[3], 3)), named("b", array(Dtype::I64, &[1], 4))];
    write_safetensors(&dir.path().join("some.safetensors"), &some).unwrap();
    fs::write(dir.path().join("notes.txt"), "no dump").unwrap();
    let dump = plain(dir.path()).unwrap();
    let names: Vec<&str> = dump.arrays.iter().map(|named| named.name.as_str()).collect();
    assert_eq!(names, ["out/attn_out", "q", "some.a", "some.b"]);
    assert_eq!((dump.format, dump.bare), (Format::Directory, false));
    // Two files of one stem would be two tensors of one name.
    write_npy(&dir.path().join("q.pt"), &array(Dtype::F32, &[], 2)).unwrap();
    assert!(plain(dir.path()).unwrap_err().contains("two tensors named `q`"));
    fs::write(dir.path().join("q.pt"), b"damaged").unwrap();
    assert!(plain(dir.path()).unwrap_err().contains("q.pt: is no dump"));
}

#[test]
fn shards_are_read_by_their_index() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (named("a", array(Dtype::F32, &[2], 1)), named("b", array(Dtype::F32, &[2], 2)));
    write_safetensors(&dir.path().join("one.safetensors"), std::slice::from_ref(&a)).unwrap();
    write_safetensors(&dir.path().join("two.safetensors"), std::slice::from_ref(&b)).unwrap();
    let index = dir.path().join("model.safetensors.index.json");
    let write = |map: &str| fs::write(&index, format!(r#"{{"metadata": {{}}, "weight_map": {map}}}"#)).unwrap();
    write(r#"{"b": "two.safetensors", "a": "one.safetensors"}"#);
    for path in [dir.path(), &index] {
        let dump = plain(path).unwrap();
        assert_eq!(
            (dump.format, dump.arrays.as_slice()),
            (Format::ShardedSafetensors, [a.clone(), b.clone()].as_slice())
        );
    }
    for (map, said) in [
        (r#"{"b": "two.safetensors", "a": "one.safetensors", "c": "one.safetensors"}"#, "does not hold it"),
        (r#"{"a": "two.safetensors"}"#, "does not list tensor `b`"),
        (r#"{"a": "../one.safetensors"}"#, "no plain file name"),
        (r#"{"a": "three.safetensors"}"#, "three.safetensors"),
        ("{}", "weight_map is empty"),
        ("[]", "index: "),
    ] {
        write(map);
        let error = plain(dir.path()).unwrap_err();
        assert!(error.contains(said), "{error} lacks {said}");
    }
}

#[test]
fn what_cannot_be_written_says_why_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let short = Array { dtype: Dtype::F32, shape: vec![3], bytes: vec![0; 11] };
    for error in
        [write_npy(&path, &short), write_pt(&path, &short), write_safetensors(&path, &[named("x", short.clone())])]
    {
        assert!(error.unwrap_err().to_string().contains("holds 11 bytes, but its shape [3] of F32 takes 12"));
    }
    let fp8 = array(Dtype::F8_E4M3, &[2], 0);
    assert!(write_npy(&path, &fp8).unwrap_err().to_string().contains("write .pt or .safetensors"));
    let twins = [named("x", fp8.clone()), named("x", fp8)];
    assert!(write_safetensors(&path, &twins).unwrap_err().to_string().contains("two tensors named `x`"));
    let reserved = [named("__metadata__", array(Dtype::U8, &[1], 0))];
    assert!(write_safetensors(&path, &reserved).is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

proptest! {
    #[test]
    fn safetensors_are_read_back(
        sizes in prop::collection::vec((prop::collection::vec(0usize..4, 0..4), 0usize..4), 0..6), first: u8,
    ) {
        let types = [Dtype::I8, Dtype::BF16, Dtype::F32, Dtype::I64];
        let arrays: Vec<NamedArray> = sizes
            .iter()
            .enumerate()
            .map(|(index, (shape, kind))| named(&format!("t{index}"), array(types[*kind], shape, first)))
            .collect();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        write_safetensors(&path, &arrays).unwrap();
        prop_assert_eq!(plain(&path).unwrap().arrays, arrays);
    }
}
