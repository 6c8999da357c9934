//! Every level against the plain one, bit for bit: all operations, odd sizes, tails, strided weights, and values at the
//! edges of their types. NaN equals NaN: which of several NaN patterns an operation returns is the CPU's own affair, and
//! no stored tensor tells them apart.

use half::bf16;
use ndarray::{Array2, s};
use proptest::prelude::*;

use super::level::{Block, Kernels, Weighted, levels};
use super::plain::Plain;
use super::upcoming::Upcoming;
use crate::elementary::mix;

/// What random operands look like.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Sizes as layers have them.
    Usual,
    /// Small integers: every sum is exact, and zeros and cancellation are common.
    Integers,
    /// Any bit pattern: subnormal, infinite and NaN values included.
    Bits,
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Usual), Just(Kind::Integers), Just(Kind::Bits)]
}

/// The BF16 value of an element.
fn value(kind: Kind, seed: u64, index: usize) -> bf16 {
    let z = mix(seed ^ mix(index as u64));
    match kind {
        Kind::Usual => bf16::from_f32((z as i16 as f32) * 1.7e-4),
        Kind::Integers => bf16::from_f32((z % 7) as f32 - 3.0),
        Kind::Bits => bf16::from_bits(z as u16),
    }
}

fn values(kind: Kind, seed: u64, shape: (usize, usize)) -> Array2<bf16> {
    Array2::from_shape_fn(shape, |(r, c)| value(kind, seed, r * shape.1 + c))
}

/// Widened values, row-major.
fn wide(kind: Kind, seed: u64, count: usize) -> Vec<f32> {
    (0..count).map(|index| value(kind, seed, index).to_f32()).collect()
}

/// INT8 values, -128 and 127 among them more often than by chance.
fn codes(seed: u64, shape: (usize, usize)) -> Array2<i8> {
    Array2::from_shape_fn(shape, |(r, c)| {
        let z = mix(seed ^ mix((r * shape.1 + c) as u64));
        match z >> 61 {
            0 => -128,
            1 => 127,
            _ => z as i8,
        }
    })
}

fn activations(seed: u64, count: usize) -> Vec<i8> {
    codes(seed, (1, count)).iter().map(|code| (*code).max(-127)).collect()
}

/// Bits, with every NaN the same.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }).collect()
}

/// Runs `operation` on the plain level and on every other, each over an output that holds rubbish before.
fn all_equal<T: Copy + PartialEq + std::fmt::Debug>(
    len: usize,
    rubbish: T,
    operation: impl Fn(&dyn Kernels, &mut [T]),
    same: impl Fn(&[T], &[T]) -> bool,
) -> Result<(), TestCaseError> {
    let mut expected = vec![rubbish; len];
    operation(&Plain, &mut expected);
    for level in levels() {
        let mut out = vec![rubbish; len];
        operation(level.as_ref(), &mut out);
        prop_assert!(same(&out, &expected), "{}: {:?} instead of {:?}", level.name(), out, expected);
    }
    Ok(())
}

fn equal_f32(len: usize, operation: impl Fn(&dyn Kernels, &mut [f32])) -> Result<(), TestCaseError> {
    all_equal(len, f32::NAN, operation, |a, b| bits(a) == bits(b))
}

/// `matrix` with `gap` columns after each row that must not be read.
fn strided<T: Clone>(matrix: &Array2<T>, gap: usize, filler: T) -> Array2<T> {
    let mut out = Array2::from_elem((matrix.nrows(), matrix.ncols() + gap), filler);
    out.slice_mut(s![.., ..matrix.ncols()]).assign(matrix);
    out
}

/// Lengths of a sum: short ones, and around the blocks of the levels.
fn depth() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..80, 120usize..140, 250usize..270, 505usize..530, 1020usize..1050]
}

/// Activation rows: as decoding has them, and more than a block of the levels takes.
fn rows() -> impl Strategy<Value = usize> {
    prop_oneof![4 => 1usize..=17, 1 => 30usize..40, 1 => 62usize..82]
}

/// Outputs: few, and around the blocks of the levels.
fn outputs() -> impl Strategy<Value = usize> {
    prop_oneof![2 => 0usize..33, 1 => 60usize..85, 1 => 120usize..135]
}

/// Half the width of a head: any, and whole blocks of the levels.
fn head_half() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..70, (1usize..9).prop_map(|n| n * 16)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 96 } else { 400 }))]

    #[test]
    fn int8_by_outputs(rows in rows(), n in outputs(), k in depth(), gap in 0usize..3, seed: u64) {
        let x = activations(seed, rows * k);
        let w = strided(&codes(!seed, (n, k)), gap, 99);
        let block = Block::new(w.slice(s![.., ..k])).unwrap();
        all_equal(rows * n, -1, |level, out| level.i8_outputs(&x, block, out), |a, b| a == b)?;
    }

    #[test]
    fn int8_by_columns(rows in 1usize..=17, n in 0usize..300, k in depth(), gap in 0usize..3, seed: u64) {
        let x = activations(seed, rows * k);
        let w = strided(&codes(!seed, (k, n)), gap, 99);
        let block = Block::new(w.slice(s![.., ..n])).unwrap();
        all_equal(rows * n, -1, |level, out| level.i8_columns(&x, block, out), |a, b| a == b)?;
    }

    #[test]
    fn bf16_by_outputs(rows in 1usize..=17, n in 0usize..15, k in depth(), gap in 0usize..3, kind in kind(), seed: u64) {
        let x = wide(kind, seed, rows * k);
        let w = strided(&values(kind, !seed, (n, k)), gap, bf16::NAN);
        let block = Block::new(w.slice(s![.., ..k])).unwrap();
        equal_f32(rows * n, |level, out| level.bf16_outputs(&x, block, out))?;
    }

    #[test]
    fn bf16_by_columns(rows in 1usize..=17, n in 0usize..80, k in depth(), gap in 0usize..3, kind in kind(), seed: u64) {
        let x = wide(kind, seed, rows * k);
        let w = strided(&values(kind, !seed, (k, n)), gap, bf16::NAN);
        let block = Block::new(w.slice(s![.., ..n])).unwrap();
        equal_f32(rows * n, |level, out| level.bf16_columns(&x, block, out))?;
    }

    #[test]
    fn scaled_by_outputs(
        rows in rows(), n in prop_oneof![0usize..15, 20usize..52], k in depth(), gap in 0usize..3, kind in kind(),
        positive: bool, seed: u64,
    ) {
        let x = wide(kind, seed, rows * k);
        let w = strided(&codes(!seed, (n, k)), gap, 99);
        let block = Block::new(w.slice(s![.., ..k])).unwrap();
        // Scales are any FP32 value, so that products fall on and around every kind of rounding boundary.
        let scale: Vec<f32> = (0..n)
            .map(|n| match kind {
                Kind::Usual => 1e-3 + (mix(seed ^ n as u64) % 1000) as f32 * 1.3e-6,
                Kind::Integers => [0.5, 1.0, 257.0, 1.003_906_25][n % 4],
                // Of many scales of any sign one is negative: some runs have finite ones without sign alone.
                Kind::Bits if positive => f32::from_bits(mix(seed ^ n as u64) as u32 % f32::INFINITY.to_bits()),
                Kind::Bits => f32::from_bits(mix(seed ^ n as u64) as u32),
            })
            .collect();
        equal_f32(rows * n, |level, out| level.scaled_outputs(&x, block, &scale, out))?;
    }

    #[test]
    fn attention_scores(group in 1usize..18, tokens in 0usize..40, half in head_half(), kind in kind(), seed: u64) {
        let q = wide(kind, seed, group * 2 * half);
        let keys = values(kind, !seed, (tokens, 2 * half));
        let keys: Vec<&[bf16]> = keys.rows().into_iter().map(|row| row.to_slice().unwrap()).collect();
        equal_f32(group * tokens, |level, out| level.scores(&q, &keys, &mut Upcoming::new(&keys, &keys, 16, &keys), out))?;
    }

    #[test]
    fn attention_values(
        group in 1usize..18,
        tokens in 1usize..40,
        tile in 1usize..20,
        half in head_half(),
        kind in kind(),
        seed: u64,
    ) {
        let p = wide(kind, seed, group * tokens);
        let values = values(kind, !seed, (tokens, 2 * half));
        let values: Vec<&[bf16]> = values.rows().into_iter().map(|row| row.to_slice().unwrap()).collect();
        let factors: Vec<[f32; 2]> =
            wide(kind, seed ^ 1, tokens.div_ceil(tile) * group * 2).chunks(2).map(|pair| [pair[0], pair[1]]).collect();
        let before = wide(kind, seed ^ 2, group * 2 * half);
        equal_f32(before.len(), |level, out| {
            out.copy_from_slice(&before);
            let values = Weighted { p: &p, factors: &factors, values: &values, tile };
            level.weighted(values, &mut Upcoming::new(values.values, values.values, 16, values.values), out);
        })?;
    }
}

/// Products that underflow make runs -0, and a canonical sum of these is +0, since its lanes begin there. A sum in one
/// accumulator is -0: one that was filled up with zeros is not.
#[test]
fn sums_keep_the_sign_of_zero() {
    let (x, w) = (bf16::from_bits(0x8001), bf16::from_bits(0x0001));
    for depth in 1..=40 {
        let values = vec![x.to_f32(); 3 * depth];
        let by_output = Array2::from_elem((17, depth), w);
        let by_column = Array2::from_elem((depth, 17), w);
        let keys: Vec<&[bf16]> = by_output.rows().into_iter().map(|row| row.to_slice().unwrap()).collect();
        let terms: Vec<&[bf16]> = by_column.rows().into_iter().map(|row| row.to_slice().unwrap()).collect();
        let codes = Array2::from_elem((17, depth), 1i8);
        let scale = vec![w.to_f32(); 17];
        let canonical = 0f32.to_bits();
        for level in levels() {
            let mut out = vec![1f32; 3 * 17];
            let mut check = |what: &str, expected: u32, operation: &dyn Fn(&mut [f32])| {
                operation(&mut out);
                assert!(out.iter().all(|sum| sum.to_bits() == expected), "{} {what} {depth}: {out:?}", level.name());
            };
            let blocks = (Block::new(by_output.view()).unwrap(), Block::new(by_column.view()).unwrap());
            check("outputs", canonical, &|out| level.bf16_outputs(&values, blocks.0, out));
            check("columns", canonical, &|out| level.bf16_columns(&values, blocks.1, out));
            let codes = Block::new(codes.view()).unwrap();
            check("scaled", canonical, &|out| level.scaled_outputs(&values, codes, &scale, out));
            check("scores", canonical, &|out| level.scores(&values, &keys, &mut Upcoming::none(), out));
            check("weighted", (-0f32).to_bits(), &|out| {
                out.fill(-0.0);
                let values = Weighted { p: &values, factors: &[[0.0, 1.0]; 3], values: &terms, tile: depth };
                level.weighted(values, &mut Upcoming::none(), out);
            });
        }
    }
}

/// Products around the smallest normal number, and sums around the largest: what instructions that know neither would
/// get wrong.
#[test]
fn sums_at_the_ends_of_the_range_are_those_of_plain_loops() {
    let (rows, outputs, depth) = (3, 18, 300);
    // Signs and lower bits are random, and some of the exponent; now and then there is a zero, or a subnormal number.
    let value = |seed: u64, index: usize, exponent: u64, spread: u64| {
        let z = mix(seed ^ mix(index as u64));
        let exponent = if z >> 58 == 0 { 0 } else { (exponent + (z >> 40) % spread).min(254) };
        let fraction = if exponent == 0 && spread < 12 { 0 } else { z & 0x7f };
        bf16::from_bits(((z >> 20 & 1) << 15 | exponent << 7 | fraction) as u16)
    };
    let small = (40..=100).map(|exponent| (exponent, 142 - exponent)).chain((0..=14).map(|more| (60, 75 + more)));
    let large = [(170, 170), (200, 140), (230, 110), (254, 60), (60, 254)];
    for (x_exponent, w_exponent) in small.chain(large) {
        for spread in [1, 3, 12] {
            let seed = x_exponent + 1000 * w_exponent + spread;
            let x: Vec<f32> = (0..rows * depth).map(|i| value(seed, i, x_exponent, spread).to_f32()).collect();
            let scale: Vec<f32> = (0..outputs)
                .map(|n| f32::from_bits((w_exponent << 23 | mix(!seed ^ n as u64) & 0x7f_ffff) as u32))
                .collect();
            let codes = codes(seed, (outputs, depth));
            let codes = Block::new(codes.view()).unwrap();
            equal_f32(rows * outputs, |level, out| level.scaled_outputs(&x, codes, &scale, out)).unwrap();
            let w = Array2::from_shape_fn((depth, outputs), |(k, n)| value(!seed, k * outputs + n, w_exponent, spread));
            let w = Block::new(w.view()).unwrap();
            equal_f32(rows * outputs, |level, out| level.bf16_columns(&x, w, out)).unwrap();
        }
    }
}

#[test]
fn every_level_has_a_name_of_its_own_and_can_be_measured() {
    let names: std::collections::BTreeSet<_> = levels().iter().map(|level| level.name()).collect();
    assert_eq!(names.len(), levels().len());
    assert_eq!(levels()[0].name(), "plain");
    for level in levels() {
        assert!(level.i8_burst(3) > 0 && level.f32_burst(3) > 0, "{}", level.name());
        assert_eq!(level.i8_burst(6), 2 * level.i8_burst(3), "{}", level.name());
    }
}
