//! FP32 sums with weights that lie output by output: BF16 ones, and those made of INT8 codes and a scale. A register holds
//! the eight canonical lanes of an output.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use half::bf16;

use super::{prefetch, tree, widen_eight};
use crate::kernels::packed::Packed;
use crate::kernels::source::Source;
use crate::kernels::sum::{LANES, RUN, RUNS};

/// Outputs whose sums are in registers together.
const OUTPUTS: usize = 3;
/// Outputs of a block: its activations are read into the first cache level once for all of them.
const BLOCK: usize = 4 * OUTPUTS;
/// Terms that a block adds before it goes on to its next outputs: two runs of every lane.
const TERMS: usize = 2 * RUNS;

/// Widened weights: for each eight terms, the lanes of each output.
type Panel = [[__m256; OUTPUTS]; TERMS / LANES];

/// Products with weights that lie output by output.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn dots<'a>(x: &[f32], depth: usize, outputs: usize, source: impl Fn(usize) -> Source<'a>, out: &mut [f32]) {
    if depth == 0 || outputs == 0 {
        return out.fill(0.0);
    }
    let sources: Vec<Source<'a>> = (0..outputs).map(source).collect();
    let packed = Packed::new(x, depth, 4);
    match x.len() / depth {
        1 => few_dots::<1>(&packed.values, &sources, out),
        2 => few_dots::<2>(&packed.values, &sources, out),
        rows => many_dots(&packed, rows, depth, &sources, out),
    }
}

/// Outputs that a few activation rows meet together: memory is read faster from four rows of weights than from fewer.
const FEW: usize = 4;

/// [`dots`] of up to two activation rows: weights are widened into registers, and the next outputs prefetched meanwhile.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn few_dots<const R: usize>(x: &[f32], sources: &[Source<'_>], out: &mut [f32]) {
    for start in (0..sources.len()).step_by(FEW) {
        // Outputs past the last repeat it and are not stored.
        let four = |start: usize| -> [&Source<'_>; FEW] { from_fn(|j| &sources[(start + j).min(sources.len() - 1)]) };
        let (block, next) = (four(start), four(start + FEW));
        let scales = block.map(|source| _mm256_set1_ps(source.scale()));
        let ties = block.iter().any(|source| source.ties());
        let lanes = if let Source::Bf16(_) = block[0] {
            let [block, next] = [block, next].map(|rows| rows.map(|row| row.bf16()));
            few_lanes::<R, bf16>(x, &block, &next, |_, eight| widen_eight(eight))
        } else {
            let [block, next] = [block, next].map(|rows| rows.map(|row| row.codes()));
            if ties {
                few_lanes::<R, i8>(x, &block, &next, |j, eight| widen_with_ties(eight, scales[j]))
            } else {
                few_lanes::<R, i8>(x, &block, &next, |j, eight| widen_scaled(eight, scales[j]))
            }
        };
        for (lanes, out) in lanes.iter().zip(out.chunks_exact_mut(sources.len())) {
            for (lanes, out) in lanes.iter().zip(&mut out[start..]) {
                *out = tree(*lanes);
            }
        }
    }
}

/// The lanes of `R` activation rows and four outputs; `widen` widens eight weights of one of them.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn few_lanes<const R: usize, T: Copy + Default>(
    x: &[f32],
    w: &[&[T]; FEW],
    next: &[&[T]; FEW],
    widen: impl Fn(usize, &[T; LANES]) -> __m256,
) -> [[__m256; FEW]; R] {
    let depth = w[0].len();
    let (whole, steps) = (depth / LANES, depth.div_ceil(LANES));
    assert!(w.iter().all(|row| row.len() == depth) && x.len() >= steps * R * LANES);
    let add = |acc: &mut [[__m256; FEW]; R], step: usize, w: [&[T; LANES]; FEW]| {
        let mut eight = [_mm256_setzero_ps(); R];
        for r in 0..R {
            // SAFETY: eight terms of row r, inside the slice by the assertion above.
            eight[r] = unsafe { _mm256_load_ps(x.as_ptr().add((step * R + r) * LANES)) };
        }
        for j in 0..FEW {
            let weights = widen(j, w[j]);
            for r in 0..R {
                acc[r][j] = _mm256_fmadd_ps(eight[r], weights, acc[r][j]);
            }
        }
    };
    let mut lanes = [[_mm256_setzero_ps(); FEW]; R];
    for start in (0..steps).step_by(2 * RUN) {
        let mut runs = [[[_mm256_setzero_ps(); FEW]; R]; 2];
        for (run, acc) in runs.iter_mut().enumerate() {
            let start = start + run * RUN;
            for row in next {
                for line in (0..RUNS * size_of::<T>()).step_by(64) {
                    prefetch(row.as_ptr().wrapping_add(start * LANES).wrapping_byte_add(line));
                }
            }
            for step in start..whole.min(start + RUN) {
                // SAFETY: each row has `whole` times eight weights.
                add(acc, step, w.map(|row| unsafe { &*row.as_ptr().add(step * LANES).cast() }));
            }
            if whole < steps && (start..start + RUN).contains(&whole) {
                // The last terms are read from a padded copy.
                let mut last = [[T::default(); LANES]; FEW];
                for (last, row) in last.iter_mut().zip(w) {
                    last[..depth % LANES].copy_from_slice(&row[whole * LANES..]);
                }
                add(acc, whole, last.each_ref());
            }
        }
        for r in 0..R {
            for j in 0..FEW {
                lanes[r][j] = _mm256_add_ps(lanes[r][j], _mm256_add_ps(runs[0][r][j], runs[1][r][j]));
            }
        }
    }
    lanes
}

/// [`dots`] of more activation rows: weights are widened into a panel that all share.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn many_dots(packed: &Packed, rows: usize, depth: usize, sources: &[Source<'_>], out: &mut [f32]) {
    let outputs = sources.len();
    let mut panel: Panel = [[_mm256_setzero_ps(); OUTPUTS]; TERMS / LANES];
    // [group of outputs][row][output]
    let mut acc = vec![[_mm256_setzero_ps(); OUTPUTS]; BLOCK / OUTPUTS * rows];
    for (sources, start) in sources.chunks(BLOCK).zip((0..outputs).step_by(BLOCK)) {
        acc.fill([_mm256_setzero_ps(); OUTPUTS]);
        for at in (0..depth).step_by(TERMS) {
            let terms = TERMS.min(depth - at);
            for (sources, acc) in sources.chunks(OUTPUTS).zip(acc.chunks_exact_mut(rows)) {
                for (output, source) in sources.iter().enumerate() {
                    widen(*source, at, terms, &mut panel, output);
                }
                for &(first, size, values) in &packed.groups {
                    let (x, acc) = (&packed.values[values + at * size..], &mut acc[first..]);
                    match size {
                        1 => dot_block::<1>(x, terms, &panel, acc),
                        2 => dot_block::<2>(x, terms, &panel, acc),
                        _ => dot_block::<4>(x, terms, &panel, acc),
                    }
                }
            }
        }
        for (row, out) in out.chunks_exact_mut(outputs).enumerate() {
            let lanes = acc.chunks_exact(rows).flat_map(|acc| acc[row]);
            for (out, lanes) in out[start..].iter_mut().zip(lanes) {
                *out = tree(lanes);
            }
        }
    }
}

/// Widens `terms` weights of an output from term `at` on, and prefetches those after them.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn widen(row: Source<'_>, at: usize, terms: usize, panel: &mut Panel, output: usize) {
    let scale = _mm256_set1_ps(row.scale());
    match row {
        Source::Bf16(row) => widen_row(row, at, terms, bf16::ZERO, panel, output, |eight| widen_eight(eight)),
        Source::Scaled(row, _, false) => {
            widen_row(row, at, terms, 0, panel, output, |eight| widen_scaled(eight, scale));
        }
        Source::Scaled(row, _, true) => {
            widen_row(row, at, terms, 0, panel, output, |eight| widen_with_ties(eight, scale));
        }
    }
}

/// `f32(code) * scale` of eight codes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn products(eight: &[i8; LANES], scale: __m256) -> __m256 {
    // SAFETY: eight codes are 64 bits.
    let codes = _mm256_cvtepi8_epi32(unsafe { _mm_loadl_epi64(eight.as_ptr().cast()) });
    _mm256_mul_ps(_mm256_cvtepi32_ps(codes), scale)
}

/// `BF16_RNE(f32(code) * scale)` of eight codes, widened, where no product lies in the middle between two BF16 values: what
/// is nearer to the next goes up.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn widen_scaled(eight: &[i8; LANES], scale: __m256) -> __m256 {
    let bits = _mm256_castps_si256(products(eight, scale));
    let rounded = _mm256_add_epi32(bits, _mm256_set1_epi32(0x8000));
    _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(-65536)))
}

/// [`widen_scaled`] of any products. Veltkamp's splitting leaves the upper 8 of 24 bits, rounded to nearest, ties to even,
/// where neither overflow nor subnormal numbers come in its way.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn widen_with_ties(eight: &[i8; LANES], scale: __m256) -> __m256 {
    let product = products(eight, scale);
    let spread = _mm256_mul_ps(product, _mm256_set1_ps(65537.0));
    _mm256_sub_ps(spread, _mm256_sub_ps(spread, product))
}

/// Fills an output's part of the panel: `widen` widens eight weights.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn widen_row<T: Copy>(
    row: &[T],
    at: usize,
    terms: usize,
    zero: T,
    panel: &mut Panel,
    output: usize,
    widen: impl Fn(&[T; LANES]) -> __m256,
) {
    for line in (0..TERMS * size_of::<T>()).step_by(64) {
        prefetch(row.as_ptr().wrapping_add(at + terms).wrapping_byte_add(line));
    }
    let (whole, rest) = row[at..at + terms].as_chunks::<LANES>();
    for (eight, panel) in whole.iter().zip(&mut *panel) {
        panel[output] = widen(eight);
    }
    if !rest.is_empty() {
        // The last terms are read from a padded copy.
        let mut last = [zero; LANES];
        last[..rest.len()].copy_from_slice(rest);
        panel[whole.len()][output] = widen(&last);
    }
}

/// Adds a panel's products, those of a first and a second run, to the lanes of `R` activation rows. Terms after the last
/// are products with zero.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dot_block<const R: usize>(x: &[f32], terms: usize, panel: &Panel, out: &mut [[__m256; OUTPUTS]]) {
    let steps = terms.div_ceil(LANES);
    let first = dot_run::<R>(x, 0..steps.min(RUN), panel);
    let second = dot_run::<R>(x, RUN..steps, panel);
    for (out, (first, second)) in out.iter_mut().zip(first.into_iter().zip(second)) {
        for output in 0..OUTPUTS {
            out[output] = _mm256_add_ps(out[output], _mm256_add_ps(first[output], second[output]));
        }
    }
}

/// The run of every lane over the panel's `steps`. With four rows the loop needs every register there is, which it gets in
/// a function of its own only.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
fn dot_run<const R: usize>(x: &[f32], steps: Range<usize>, panel: &Panel) -> [[__m256; OUTPUTS]; R] {
    let mut acc = [[_mm256_setzero_ps(); OUTPUTS]; R];
    assert!(steps.is_empty() || x.len() >= steps.end * R * LANES);
    for step in steps {
        let w = panel[step];
        for r in 0..R {
            // SAFETY: eight activations of row r, inside the slice by the assertion above.
            let x = unsafe { _mm256_load_ps(x.as_ptr().add((step * R + r) * LANES)) };
            for output in 0..OUTPUTS {
                acc[r][output] = _mm256_fmadd_ps(x, w[output], acc[r][output]);
            }
        }
    }
    acc
}
