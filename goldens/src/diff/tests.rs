//! Counts against the definition, and the patterns that reports name.

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::elements::Scalar;

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn f32s(a: &[f32], b: &[f32], shape: &[usize]) -> TensorDiff {
    let (a, b) = (bytes_of(a), bytes_of(b));
    let side = |bytes| Side { dtype: Dtype::F32, shape, bytes };
    compare("x", &side(&a), &side(&b))
}

#[test]
fn a_mismatch_is_counted_measured_and_placed() {
    // 16,384 elements, 40 of them differ, 2 by far and exactly half.
    let a: Vec<f32> = (0..16_384).map(|at| 1.0 + at as f32 / 16_384.0).collect();
    let mut b = a.clone();
    for at in 0..38 {
        let place = at * 401 + 7;
        b[place] = f32::from_bits(b[place].to_bits() + 1);
    }
    for place in [5_000, 16_383] {
        b[place] *= 0.5;
    }
    let diff = f32s(&a, &b, &[128, 128]);
    assert_eq!((diff.verdict, diff.elements, diff.differing), (Verdict::Fail, 16_384, Some(40)));
    let ulps = diff.ulps.unwrap();
    assert_eq!((ulps.up_to_1, ulps.more, ulps.max), (38, 2, 1 << 23));
    assert_eq!(diff.patterns, Patterns { exactly_half: 2, ..Patterns::default() });
    assert_eq!(diff.nonfinite, [0, 0]);
    assert_eq!(diff.worst.len(), WORST);
    assert_eq!(diff.worst[0].index, [5_000 / 128, 5_000 % 128]);
    assert_eq!(diff.worst[1].index, [127, 127]);
    assert_eq!(diff.worst[1].a_bits, format!("{:#010x}", a[16_383].to_bits()));
    assert_eq!((diff.worst[2].index.clone(), diff.worst[2].ulps), (vec![0, 7], Some(1)));
}

#[test]
fn signs_zeros_and_nans_are_told_apart() {
    let nan = f32::from_bits(0x7FC0_0001);
    let a = [0.0, 1.0, 2.0, 0.0, f32::NAN, 1.0, 1.0, f32::INFINITY];
    let b = [-0.0, -1.0, 0.0, 3.0, nan, f32::NAN, 2.0, f32::MAX];
    let diff = f32s(&a, &b, &[8]);
    let expected = Patterns {
        sign: 2,
        zero_in_b: 1,
        zero_in_a: 1,
        both_nan: 1,
        one_nan: 1,
        exactly_double: 1,
        ..Patterns::default()
    };
    assert_eq!((diff.differing, diff.patterns), (Some(8), expected));
    assert_eq!(diff.nonfinite, [2, 2]);
    assert_eq!((diff.worst[0].index.clone(), diff.worst[0].ulps), (vec![5], None));
    let ulps = diff.ulps.unwrap();
    assert_eq!(ulps.ranges().map(|(_, count)| count).iter().sum::<u64>(), 6);
}

#[test]
fn column_major_order_is_named_and_says_whose() {
    let rows: Vec<f32> = (0..12).map(|at| at as f32).collect();
    let columns: Vec<f32> = (0..12).map(|at| rows[(at % 3) * 4 + at / 3]).collect();
    let said = |diff: TensorDiff| diff.notes.join("; ");
    assert!(said(f32s(&rows, &columns, &[3, 4])).starts_with("same values, column-major order: the second"));
    assert!(said(f32s(&columns, &rows, &[3, 4])).starts_with("same values, column-major order: the first"));
    let mut other = columns.clone();
    other[11] += 1.0;
    assert_eq!(said(f32s(&rows, &other, &[3, 4])), "");
    let bytes = [bytes_of(&rows), bytes_of(&columns)];
    let side = |at: usize, shape| Side { dtype: Dtype::F32, shape, bytes: &bytes[at] };
    assert_eq!(said(compare("x", &side(0, &[3, 4]), &side(1, &[4, 3]))), "same values, transposed");
    assert_eq!(said(compare("x", &side(0, &[3, 4]), &side(0, &[12]))), "the bytes are the same");
}

#[test]
fn another_type_or_shape_has_no_counterparts() {
    let bytes = [0u8; 8];
    let side = |dtype, shape| Side { dtype, shape, bytes: &bytes };
    let diff = compare("x", &side(Dtype::F32, &[2]), &side(Dtype::I32, &[2]));
    assert_eq!((diff.verdict, diff.differing, diff.elements), (Verdict::Fail, None, 2));
    let empty = Side { dtype: Dtype::F32, shape: &[0], bytes: &[] };
    assert_eq!(compare("x", &empty, &empty).verdict, Verdict::Pass);
}

#[test]
fn complex_numbers_are_compared_part_by_part() {
    let (a, b) = (bytes_of(&[1.0, 2.0, 3.0, 4.0]), bytes_of(&[1.0, 2.0, 3.0, 5.0]));
    let side = |bytes| Side { dtype: Dtype::C64, shape: &[2], bytes };
    let diff = compare("x", &side(&a), &side(&b));
    assert_eq!((diff.elements, diff.differing), (2, Some(1)));
    assert_eq!((diff.worst[0].index.clone(), diff.worst[0].a), (vec![1, 1], Scalar::Single(4.0)));
}

proptest! {
    #[test]
    fn every_count_is_that_of_the_definition(
        length in 1usize..20_000,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u16>()), 0..30),
    ) {
        let a: Vec<u16> = (0..length).map(|at| (at * 2_654_435_761) as u16).collect();
        let mut b = a.clone();
        for (index, bits) in changes {
            b[index.index(length)] = bits;
        }
        let bytes = |values: &[u16]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let (bytes_a, bytes_b) = (bytes(&a), bytes(&b));
        let side = |bytes| Side { dtype: Dtype::BF16, shape: std::slice::from_ref(&length), bytes };
        let diff = compare("x", &side(&bytes_a), &side(&bytes_b));
        let differ: Vec<usize> = (0..length).filter(|&at| a[at] != b[at]).collect();
        prop_assert_eq!(diff.differing, Some(differ.len() as u64));
        prop_assert_eq!(diff.verdict == Verdict::Pass, differ.is_empty());
        let place = |bits: u16| {
            let value = bf16::from_bits(bits);
            let magnitude = i64::from(bits & 0x7FFF);
            (!value.is_nan()).then_some(if bits >> 15 == 1 { -magnitude } else { magnitude })
        };
        let distances: Vec<_> =
            differ.iter().filter_map(|&at| Some(place(a[at])?.abs_diff(place(b[at])?))).collect();
        if let Some(ulps) = diff.ulps {
            prop_assert_eq!(ulps.max, distances.iter().copied().max().unwrap_or(0));
            let counts: u64 = ulps.ranges().iter().map(|(_, count)| count).sum();
            prop_assert_eq!(counts, distances.len() as u64);
        }
        for worst in &diff.worst {
            prop_assert!(differ.contains(&worst.index[0]));
        }
        prop_assert_eq!(diff.worst.len(), differ.len().min(WORST));
        let infinite = |values: &[u16]| values.iter().filter(|&&bits| !bf16::from_bits(bits).is_finite()).count() as u64;
        prop_assert_eq!(diff.nonfinite, [infinite(&a), infinite(&b)]);
    }
}
