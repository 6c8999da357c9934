//! Pickles that ask for too much, in every way.

use super::*;

fn refusal(bytes: &[u8]) -> String {
    Pickle::read(bytes, 0).unwrap_err().to_string()
}

fn made(parts: &[&[u8]]) -> Vec<u8> {
    [&[0x80, 2][..]].iter().chain(parts).copied().collect::<Vec<_>>().concat()
}

#[test]
fn plain_values_are_read_in_all_protocols() {
    for protocol in 2..=4 {
        let bytes = [0x80, protocol, b']', b'(', b'K', 1, b'M', 2, 1, b'J', 0xFF, 0xFF, 0xFF, 0xFF, b'e', b'.', b'x'];
        let pickle = Pickle::read(&bytes, 0).unwrap();
        let list = pickle.sequence(pickle.root).unwrap();
        assert_eq!(list.iter().map(|&value| pickle.size(value)).collect::<Vec<_>>(), [Some(1), Some(258), None]);
        assert_eq!(pickle.end, bytes.len() - 1);
    }
    let long = made(&[&[0x8A, 3, 1, 0, 0x80], b"."]);
    assert!(matches!(Pickle::read(&long, 0).unwrap().root, Value::Int(-8_388_607)));
}

#[test]
fn every_other_name_and_operation_is_refused_by_name() {
    for (name, said) in
        [("builtins\nprint", "`builtins.print`"), ("os\nsystem", "`os.system`"), ("torch\nload", "`torch.load`")]
    {
        let error = refusal(&made(&[b"c", name.as_bytes(), b"\n."]));
        assert!(error.contains(said) && error.contains("byte 2"), "{error}");
    }
    let stacked = [&[0x80, 4, 0x8C, 2][..], b"os", &[0x8C, 6], b"system", &[0x93], b"."].concat();
    assert!(refusal(&stacked).contains("`os.system`"));
    for (byte, name) in [
        (b'i', "INST"),
        (b'o', "OBJ"),
        (0x81, "NEWOBJ"),
        (0x92, "NEWOBJ_EX"),
        (0x82, "EXT1"),
        (b'P', "PERSID"),
        (b'0', "POP"),
        (b'2', "DUP"),
        (b'B', "BINBYTES"),
        (0x8F, "EMPTY_SET"),
        (0x97, "NEXT_BUFFER"),
        (0xFF, "0xff"),
    ] {
        let error = refusal(&made(&[&[byte], b"."]));
        assert!(error.contains(&format!("operation {name}")), "{error}");
    }
    assert!(refusal(&[0x80, 5, b'N', b'.']).contains("protocol 5 is not read"));
    assert!(refusal(&[0x80, 1, b'N', b'.']).contains("protocol 1 is not read"));
}

#[test]
fn calls_and_attributes_are_refused_where_they_are_not_needed() {
    let ordered = b"ccollections\nOrderedDict\n";
    for (bytes, said) in [
        (made(&[ordered, b")Rq\0}b."]), ""),
        (made(&[ordered, b"}b."]), "sets attributes of what is no dict"),
        (made(&[ordered, b"](K\x01eR."]), "calls with what is no tuple"),
        (made(&[ordered, b"K\x01\x85R."]), "makes an OrderedDict of what is given"),
        (made(&[b"ctorch\nFloatStorage\n)R."]), "calls what is no function"),
        (made(&[b"N)R."]), "calls what is no name"),
        (made(&[b"K\x01Q."]), "persistent id is no tuple"),
    ] {
        match Pickle::read(&bytes, 0) {
            Ok(_) => assert!(said.is_empty()),
            Err(error) => assert!(!said.is_empty() && error.to_string().contains(said), "{error} lacks {said}"),
        }
    }
}

#[test]
fn memos_have_no_gaps() {
    assert!(refusal(&made(&[b"Nr\xFF\xFF\xFF\xFF."])).contains("stores memo 4294967295, where 0 would be the next"));
    assert!(refusal(&made(&[b"Nq\x01."])).contains("indices with gaps are refused"));
    assert!(refusal(&made(&[b"h\x00."])).contains("uses memo 0, which was never stored"));
    assert!(Pickle::read(&made(&[b"Nq\x00h\x00\x86."]), 0).is_ok());
}

#[test]
fn stacks_lists_and_texts_are_bounded() {
    for (bytes, said) in [
        (made(&[&vec![b'N'; 1 << 20]]), "more than 262144 values at once"),
        (made(&[&vec![b'('; 1 << 20]]), "more than 262144 values at once"),
        (made(&[&vec![b']'; 1 << 20]]), "more than 262144 values"),
        (made(&[b"N", &vec![0x94; 1 << 20]]), "more than 262144 values"),
        (made(&[b"]", &b"Na".repeat(3 << 20)]), "more than 524288 values in lists"),
        (made(&[b"X\x00\x00\x02\x00", &vec![b'a'; 1 << 17], b"."]), "bytes of text in one piece"),
        (made(&[b"X\xFF\xFF\xFF\xFFabc"]), "ends at byte"),
        (made(&[&[0x8D], &u64::MAX.to_le_bytes(), b"abc"]), "ends at byte"),
        (made(&[&[0x95], &u64::MAX.to_le_bytes(), b"N."]), "ends at byte"),
        (made(&[&[0x8B], &u32::MAX.to_le_bytes(), b"N."]), "ends at byte"),
        (made(&[b"X\x01\x00\x00\x00\xFF."]), "text is not UTF-8"),
        (made(&[b"c", &vec![b'a'; 1 << 17]]), "ends at byte"),
        (made(&[b"t."]), "closes what was never opened"),
        (made(&[b"(N."]), "ends with values that belong to nothing"),
        (made(&[b"NN."]), "ends with values that belong to nothing"),
        (made(&[b"N(a."]), "takes a value where there is none"),
        (made(&[b"N(\x85."]), "takes a value where there is none"),
        (made(&[b"}(Nu."]), "sets a key without a value"),
        (made(&[b"NNNs."]), "changes a value where there is none"),
        (vec![], "ends at byte 0"),
    ] {
        let error = refusal(&bytes);
        assert!(error.contains(said), "{error} lacks {said}");
    }
}

proptest::proptest! {
    #[test]
    fn any_bytes_end_in_a_value_or_an_error(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
        let _ = Pickle::read(&bytes, 0);
    }
}
