//! Argument dumps: what is data, and what must never be taken for it.

use super::*;
use crate::dump::{Dump, ReadOptions, open_argument_bytes, read as read_dump};

fn record(task: u64, index: usize, more: &str) -> String {
    format!(
        r#"{{"task_id": "0x{task:016x}", "func_id": [3, 4], "role": "output", "stage": "after_completion",
           "arg_index": {index}, "kind": "tensor", "dtype": "BFLOAT16", "shape": [2, 3], "strides": [1, 2],
           "start_offset": 5, "is_contiguous": false{more}}}"#
    )
}

fn placed(task: u64, index: usize, offset: usize, more: &str) -> String {
    record(task, index, &format!(r#", "truncated": false, "bin_offset": {offset}, "bin_size": 12{more}"#))
}

fn manifest(records: &[String], more: &str) -> String {
    format!(
        r#"{{"run_dir": "args_dump", "bin_format": {{"type": "logical_contiguous", "byte_order": "little_endian"}},
           "dump_args_level": 2, "total_args": {}, "bin_file": "args.bin"{more}, "args": [{}]}}"#,
        records.len(),
        records.join(",")
    )
}

fn open(manifest: &str, payload: usize) -> Result<Dump, String> {
    let payload = Some((0..payload).map(|at| at as u8).collect());
    open_argument_bytes(manifest.as_bytes(), payload).map(|found| found.into_dump()).map_err(|error| error.to_string())
}

#[test]
fn payloads_are_read_as_they_lie_whatever_the_strides_say() {
    let dump = open(&manifest(&[placed(1, 0, 0, ""), placed(1, 1, 12, "")], r#", "dropped_records": 3"#), 24).unwrap();
    assert_eq!((dump.arrays.len(), dump.unusable.len()), (2, 0));
    let second = &dump.arrays[1];
    assert_eq!(second.name, "0x0000000000000001.arg1.output.after_completion");
    assert_eq!((second.array.dtype, second.array.shape.as_slice()), (Dtype::BF16, [2, 3].as_slice()));
    assert_eq!(second.array.bytes, (12..24).collect::<Vec<u8>>());
    let record = &dump.records[1];
    assert_eq!((record.task.as_str(), record.index), ("0x0000000000000001", 1));
    assert_eq!(
        (record.functions.as_slice(), record.role, record.stage),
        ([3, 4].as_slice(), Role::Output, Stage::AfterCompletion)
    );
    assert_eq!(dump.remarks, ["3 records were dropped by the runtime and are not listed"]);
}

#[test]
fn cut_overwritten_and_discarded_records_are_named_and_never_data() {
    let marked = |index, mark: &str| record(7, index, &format!(r#", "bin_offset": 0, "bin_size": 12, "{mark}": true"#));
    let records = [
        marked(0, "truncated"),
        marked(1, "overwritten"),
        marked(2, "host_discarded"),
        marked(3, "arg_index_ambiguous"),
        placed(7, 4, 0, "").replace("BFLOAT16", "FP4E2M1"),
        placed(7, 5, 0, ""),
    ];
    let dump = open(&manifest(&records, r#", "truncated_args": 1"#), 12).unwrap();
    assert_eq!(dump.arrays.len(), 1);
    assert_eq!(dump.records.len(), 6);
    let reasons: Vec<&str> = dump.unusable.iter().map(|bad| bad.reason.split(':').next().unwrap()).collect();
    assert_eq!(reasons[..4], ["truncated", "overwritten", "discarded on the host", "ambiguous"]);
    assert!(reasons[4].contains("FP4E2M1"), "{reasons:?}");
    assert_eq!(dump.unusable[0].name, "0x0000000000000007.arg0.output.after_completion");
}

#[test]
fn without_a_file_of_payloads_there_is_no_data() {
    let text = manifest(&[placed(1, 0, 0, "")], "").replace(r#""args.bin""#, "null");
    let dump = open_argument_bytes(text.as_bytes(), None).unwrap().into_dump();
    assert!(dump.arrays.is_empty() && dump.unusable[0].reason.contains("bin_file is null"));
}

#[test]
fn scalars_are_what_the_manifest_prints_exactly() {
    let scalar = |index: usize, dtype: &str, value: &str| {
        record(1, index, &format!(r#", "bin_offset": 0, "bin_size": 0, "value": {value}"#))
            .replace("BFLOAT16", dtype)
            .replace(r#""tensor""#, r#""scalar""#)
            .replace("[2, 3]", "[]")
    };
    let records = [
        scalar(0, "INT32", "-5"),
        scalar(1, "UINT64", "18446744073709551615"),
        scalar(2, "BOOL", "true"),
        scalar(3, "FLOAT32", "0.333333"),
        scalar(4, "FLOAT32", "\"$Inf\""),
        scalar(5, "INT32", "4294967296"),
    ];
    let dump = open(&manifest(&records, ""), 0).unwrap();
    let bytes: Vec<&[u8]> = dump.arrays.iter().map(|named| named.array.bytes.as_slice()).collect();
    assert_eq!(bytes, [&(-5i32).to_le_bytes()[..], &[0xFF; 8], &[1]]);
    assert!(dump.arrays.iter().all(|named| named.array.shape.is_empty()));
    assert_eq!(dump.unusable.len(), 3);
    assert!(dump.unusable[0].reason.contains("few digits"));
}

#[test]
fn records_that_cannot_be_right_are_refused_by_name() {
    let one = placed(1, 0, 0, "");
    for (text, payload, said) in [
        (
            manifest(std::slice::from_ref(&one), ""),
            11,
            "arg0.output.after_completion): its payload is at byte 0 and takes 12",
        ),
        (manifest(&[one.replace(r#""bin_size": 12"#, r#""bin_size": 8"#)], ""), 12, "bin_size is 8, but shape [2, 3]"),
        (manifest(&[one.replace("[2, 3]", "[4294967296, 4294967296]")], ""), 12, "overflows"),
        (manifest(&[one.clone(), one.clone()], ""), 12, "record 1 (0x0000000000000001.arg0"),
        (manifest(&[one.clone(), placed(1, 1, 0, "")], ""), 12, "has the payload of record 0"),
        (manifest(&[one.clone(), placed(1, 1, 5, "")], ""), 24, "inside that of record 0"),
        (
            manifest(std::slice::from_ref(&one), r#", "truncated_args": 2"#),
            12,
            "truncated_args is 2, but 0 records say so",
        ),
        (
            manifest(std::slice::from_ref(&one), "").replace("\"total_args\": 1", "\"total_args\": 9"),
            12,
            "lists 1 records",
        ),
        (
            manifest(std::slice::from_ref(&one), "").replace("little_endian", "big_endian"),
            12,
            "expected \"logical_contiguous\"",
        ),
        (manifest(&[one.replace("output", "sideways")], ""), 12, "sideways"),
        (
            manifest(&[one.replace("18446744073709551616", "")], "")
                .replace(": 0, \"bin_size\"", ": 18446744073709551615, \"bin_size\""),
            12,
            "cut short",
        ),
        (manifest(&[one.replace("[2, 3]", &format!("[{}1]", "1,".repeat(64)))], ""), 12, "more than 64 numbers"),
        (format!("{{\"bin_format\": {}", "[".repeat(200_000)), 0, "args_dump.json"),
    ] {
        let error = open(&text, payload).unwrap_err();
        assert!(error.contains(said), "{error} lacks {said}");
    }
}

#[test]
fn a_directory_and_the_one_above_it_are_opened() {
    let dir = tempfile::tempdir().unwrap();
    let below = dir.path().join("args_dump");
    std::fs::create_dir(&below).unwrap();
    std::fs::write(below.join("args_dump.json"), manifest(&[placed(1, 0, 0, "")], "")).unwrap();
    let missing = read_dump(&below, &ReadOptions::default()).unwrap_err().to_string();
    assert!(missing.contains("args.bin"), "{missing}");
    std::fs::write(below.join("args.bin"), [9; 12]).unwrap();
    for path in [dir.path().to_path_buf(), below.clone(), below.join("args_dump.json")] {
        assert_eq!(read_dump(&path, &ReadOptions::default()).unwrap().arrays[0].array.bytes, [9; 12]);
    }
    let outside = manifest(&[placed(1, 0, 0, "")], "").replace("args.bin", "../args.bin");
    std::fs::write(below.join("args_dump.json"), outside).unwrap();
    let error = read_dump(&below, &ReadOptions::default()).unwrap_err().to_string();
    assert!(error.contains("expected the name of a file beside the manifest"), "{error}");
}
