//! What a step leaves in the caches.

use assay_tests::{Bench, Device, Token, written};
use device::{Captured, Captures};
use half::bf16;
use ndarray::{Axis, aview0};
use reference::TensorId as T;

use super::{Fault, benches, captured, gross, subtle};

pub fn faults() -> Vec<Fault> {
    let two_rows = benches::two_rows;
    vec![
        captured(
            "slot-plus-1",
            two_rows,
            &["k_written_rows", "v_written_rows"],
            &["slot +1", "2 cache rows not written"],
            |bench, captures| {
                *captures = without_the_write(bench, 1);
                let places = places(bench, 1);
                for (cache, right) in [
                    (&mut captures.k_written, &bench.captures.k_written),
                    (&mut captures.v_written, &bench.captures.v_written),
                ] {
                    let right = written::read(right.as_ref().unwrap());
                    written::edit(cache, &bench.case.geometry, |rows| {
                        rows.extend(places.iter().map(|place| (place + 1, right[place].clone())));
                    });
                }
            },
        ),
        captured(
            "write-missing",
            two_rows,
            &["k_written_rows", "v_written_rows"],
            &["2 cache rows not written", "KV head 0"],
            |bench, captures| {
                *captures = without_the_write(bench, 1);
            },
        ),
        captured(
            "write-missing-but-attended",
            two_rows,
            &["k_written_rows", "v_written_rows", "attn_out"],
            &["2 cache rows not written"],
            |bench, captures| {
                let missing = without_the_write(bench, 0);
                (captures.k_written, captures.v_written) = (missing.k_written, missing.v_written);
            },
        ),
        captured(
            "write-extra",
            two_rows,
            &["k_written_rows"],
            &["no slot of this batch names", "page 0, slot 3"],
            |bench, captures| {
                written::edit(&mut captures.k_written, &bench.case.geometry, |rows| {
                    rows.insert(3, vec![bf16::ONE; bench.case.geometry.head_dim]);
                });
            },
        ),
        captured(
            "write-outside-the-cache",
            two_rows,
            &["v_written_rows"],
            &["outside the cache", "-1"],
            |bench, captures| {
                written::edit(&mut captures.v_written, &bench.case.geometry, |rows| {
                    rows.insert(i64::MAX, vec![bf16::ONE; bench.case.geometry.head_dim]);
                    rows.insert(-1, vec![bf16::ONE; bench.case.geometry.head_dim]);
                });
            },
        ),
        captured("row-listed-twice", two_rows, &["k_written_rows"], &["listed more than once"], |_, captures| {
            let rows = captures.k_written.as_mut().unwrap();
            let (Captured::Values(places), Captured::Values(values)) = (&mut rows.rows, &mut rows.values) else {
                panic!()
            };
            places.push(Axis(0), aview0(&places[0].clone())).unwrap();
            values.push(Axis(0), values.row(0).to_owned().view()).unwrap();
        }),
        gross(
            "k-and-v-exchanged",
            two_rows,
            &["k_written_values", "v_written_values"],
            &["the K cache holds what belongs to V"],
            |d| {
                let (k, v) = (d.tensor(T::KRows).clone(), d.tensor(T::VRows).clone());
                d.set(T::KRows, v).set(T::VRows, k);
            },
        ),
        gross("kv-heads-rotated", two_rows, &["v_written_values"], &["head 0 has head 1's values"], |d| {
            let (dim, width) = (d.inputs.geometry.head_dim, d.inputs.geometry.kv_width());
            d.rearrange(T::VRows, |b, n| (b, (n + dim) % width));
        }),
        subtle("v-in-truncation", two_rows, &["v_written_values"], &[], |d| {
            let policy = d.policy.clone().with(reference::Site::VCache, reference::Rounding::Trunc);
            d.redo_under(T::VRows, &policy);
        }),
        captured("rows-of-the-wrong-type", two_rows, &["k_written_rows"], &["INT32", "INT64"], |_, captures| {
            let found = Captured::WrongDType { found: "INT32".to_owned(), shape: vec![32] };
            captures.k_written.as_mut().unwrap().rows = found;
        }),
        captured("values-of-the-wrong-type", two_rows, &["v_written_values"], &["FP32", "BF16"], |_, captures| {
            let found = Captured::WrongDType { found: "FP32".to_owned(), shape: vec![32, 64] };
            captures.v_written.as_mut().unwrap().values = found;
        }),
        captured("work-items-of-padding-rows", two_rows, &[], &["work_items", "32, expected 4"], |_, captures| {
            captures.metadata.insert("online_softmax_work_items".to_owned(), "32".to_owned());
        }),
    ]
}

/// The device without row `row`'s write: its attention finds what was there before.
fn without_the_write(bench: &Bench, row: usize) -> Captures {
    let mut device = bench.device();
    let tokens = device.tokens(row, bench.layer().batch.seq_lens[row]);
    let stale: Vec<Token> = tokens.into_iter().map(|(slot, _)| (slot, None)).collect();
    let mut captures = device.attend(row, &stale).follow().captures();
    for cache in [&mut captures.k_written, &mut captures.v_written] {
        written::edit(cache, &bench.case.geometry, |rows| rows.retain(|place, _| !places(bench, row).contains(place)));
    }
    captures
}

/// The cache rows of a batch row's slot.
fn places(bench: &Bench, row: usize) -> Vec<i64> {
    let slot = bench.layer().batch.slots[row];
    let heads = 0..bench.case.geometry.num_key_value_heads;
    heads.map(|head| reference::inputs::cache_row(&bench.case.geometry, slot, head) as i64).collect()
}

#[test]
fn a_final_cache_that_the_rows_do_not_make_fails() {
    for input in [cases::Input::KCache, cases::Input::VCache] {
        let recorded = benches::recorded();
        let mut case = recorded.case.clone();
        case.final_cache_sha256.insert(input, "0".repeat(64));
        let bench = Bench { case, inputs: recorded.inputs.clone(), captures: recorded.captures.clone() };
        let report = bench.gate(bench.captures.clone());
        assert_eq!(report.verdict.name(), "fail");
        let check = assay_tests::said::check(&report, "kv_values");
        assert!(check.detail.contains("final_cache_sha256") && check.detail.contains(input.name()), "{}", check.detail);
    }
}

#[test]
fn a_replicated_padding_row_must_have_row_0s_bits() {
    let bench = benches::replicated();
    // One unit in the last place, which the order of a sum would explain in a row of its own.
    let mut device: Device<'_> = bench.device();
    device.nudge(T::InvRmsStates, |b, _| u32::from(b == 7)).follow();
    let report = bench.gate(device.captures());
    let check = assay_tests::said::check(&report, "row_independence");
    assert_eq!((report.verdict.name(), check.verdict.name()), ("fail", "fail"), "{}", check.detail);
    assert!(check.detail.contains("inv_rms_states: row 7"), "{}", check.detail);
}
