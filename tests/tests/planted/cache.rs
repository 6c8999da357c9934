//! What a step leaves in the caches.

use assay_tests::{Bench, Device, Token, written};
use device::{Captured, Captures, WrittenRows};
use half::bf16;
use reference::TensorId as T;

use super::Plant::{Captures as InCaptures, Step};
use super::{Fault, benches};

pub fn faults() -> Vec<Fault> {
    let two_rows = benches::two_rows;
    vec![
        Fault { id: "slot-plus-1", on: two_rows, plant: InCaptures(|bench, captures| {
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
        }), fails: &["k_written_rows", "v_written_rows"], says: &["slot +1", "2 cache rows not written"], alone: false },
        Fault { id: "write-missing", on: two_rows, plant: InCaptures(|bench, captures| {
            *captures = without_the_write(bench, 1);
        }), fails: &["k_written_rows", "v_written_rows"], says: &["2 cache rows not written", "KV head 0"], alone: false },
        Fault { id: "write-missing-but-attended", on: two_rows, plant: InCaptures(|bench, captures| {
            let missing = without_the_write(bench, 0);
            (captures.k_written, captures.v_written) = (missing.k_written, missing.v_written);
        }), fails: &["k_written_rows", "v_written_rows", "attn_out"], says: &["2 cache rows not written"], alone: false },
        Fault { id: "write-extra", on: two_rows, plant: InCaptures(|bench, captures| {
            written::edit(&mut captures.k_written, &bench.case.geometry, |rows| {
                rows.insert(3, vec![bf16::ONE; bench.case.geometry.head_dim]);
            });
        }), fails: &["k_written_rows"], says: &["no slot of this batch names", "page 0, slot 3"], alone: false },
        Fault { id: "write-outside-the-cache", on: two_rows, plant: InCaptures(|bench, captures| {
            written::edit(&mut captures.v_written, &bench.case.geometry, |rows| {
                rows.insert(i64::MAX, vec![bf16::ONE; bench.case.geometry.head_dim]);
                rows.insert(-1, vec![bf16::ONE; bench.case.geometry.head_dim]);
            });
        }), fails: &["v_written_rows"], says: &["outside the cache", "-1"], alone: false },
        Fault { id: "row-listed-twice", on: two_rows, plant: InCaptures(|_, captures| {
            let WrittenRows { rows: Captured::Values(rows), .. } = captures.k_written.as_mut().unwrap() else { panic!() };
            rows[0] = rows[1];
        }), fails: &["k_written_rows"], says: &["listed more than once"], alone: false },
        Fault { id: "k-and-v-exchanged", on: two_rows, plant: Step(|d| {
            let (k, v) = (d.tensor(T::KRows).clone(), d.tensor(T::VRows).clone());
            d.set(T::KRows, v).set(T::VRows, k);
        }), fails: &["k_written_values", "v_written_values"], says: &["the K cache holds what belongs to V"], alone: true },
        Fault { id: "kv-heads-rotated", on: two_rows, plant: Step(|d| {
            let (dim, width) = (d.inputs.geometry.head_dim, d.inputs.geometry.kv_width());
            d.rearrange(T::VRows, |b, n| (b, (n + dim) % width));
        }), fails: &["v_written_values"], says: &["head 0 has head 1's values"], alone: false },
        Fault { id: "v-in-truncation", on: two_rows, plant: Step(|d| {
            let policy = d.policy.clone().with(reference::Site::VCache, reference::Rounding::Trunc);
            d.redo_under(T::VRows, &policy);
        }), fails: &["v_written_values"], says: &[], alone: false },
        Fault { id: "rows-of-the-wrong-type", on: two_rows, plant: InCaptures(|_, captures| {
            let found = Captured::WrongDType { found: "INT32".to_owned(), shape: vec![32] };
            captures.k_written.as_mut().unwrap().rows = found;
        }), fails: &["k_written_rows"], says: &["INT32", "INT64"], alone: false },
        Fault { id: "values-of-the-wrong-type", on: two_rows, plant: InCaptures(|_, captures| {
            let found = Captured::WrongDType { found: "FP32".to_owned(), shape: vec![32, 64] };
            captures.v_written.as_mut().unwrap().values = found;
        }), fails: &["v_written_values"], says: &["FP32", "BF16"], alone: false },
        Fault { id: "work-items-of-padding-rows", on: two_rows, plant: InCaptures(|_, captures| {
            captures.metadata.insert("online_softmax_work_items".to_owned(), "32".to_owned());
        }), fails: &[], says: &["work_items", "32, expected 4"], alone: false },
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
