//! FP32 sums with weights that lie output by output: BF16 ones, and those made of INT8 codes and a scale. A register holds
//! the eight canonical lanes of two outputs.

use std::arch::x86_64::*;
use std::array::from_fn;
use std::cell::Cell;

use half::bf16;

use super::ZERO;
use crate::kernels::avx2::prefetch;
use crate::kernels::packed::Packed;
use crate::kernels::source::Source;
use crate::kernels::sum::{LANES, RUN, RUNS};

/// Pairs of outputs whose sums are in registers together.
const PAIRS: usize = 3;
/// Outputs of a block: its activations are read into the first cache level once for all of them.
const OUTPUTS: usize = 8 * PAIRS;
/// Terms that a block adds before it goes on to its next outputs.
const TERMS: usize = 2 * RUNS;

/// Widened weights: for each eight terms, the lanes of two outputs side by side, for each pair.
type Panel = [Cell<[__m512; PAIRS]>; TERMS / LANES];

/// Products with weights that lie output by output.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn dots<'a>(x: &[f32], depth: usize, outputs: usize, source: impl Fn(usize) -> Source<'a>, out: &mut [f32]) {
    if depth == 0 || outputs == 0 {
        return out.fill(0.0);
    }
    let packed = Packed::new(x, depth, 8);
    let sources: Vec<Source<'a>> = (0..outputs).map(source).collect();
    let rows = x.len() / depth;
    let panel: Panel = [const { Cell::new([ZERO; PAIRS]) }; TERMS / LANES];
    // [group of pairs][row][pair]
    let mut acc = vec![[ZERO; PAIRS]; OUTPUTS / (2 * PAIRS) * rows];
    let mut ahead = Vec::new();
    for start in (0..outputs).step_by(OUTPUTS) {
        acc.fill([ZERO; PAIRS]);
        // Outputs past the last repeat it and are not stored.
        let row = |n: usize| &sources[n.min(outputs - 1)];
        let groups = (outputs - start).div_ceil(2 * PAIRS).min(OUTPUTS / (2 * PAIRS));
        for at in (0..depth).step_by(TERMS) {
            let terms = TERMS.min(depth - at);
            // What comes next: later terms of these outputs, or the first ones of the next.
            ahead.clear();
            let (next, from) = if at + terms < depth { (start, at + terms) } else { (start + OUTPUTS, 0) };
            for j in 0..OUTPUTS {
                let (address, bytes) = row(next + j).address(from);
                ahead.extend((0..TERMS * bytes).step_by(64).map(|line| address.wrapping_add(line)));
            }
            let passes = groups * packed.groups.len();
            let mut ahead = ahead.chunks(ahead.len().div_ceil(passes));
            for (group, acc) in acc.chunks_exact_mut(rows).enumerate().take(groups) {
                let weights: [&Source<'a>; 2 * PAIRS] = from_fn(|j| row(start + group * 2 * PAIRS + j));
                for (index, &(first, size, values)) in packed.groups.iter().enumerate() {
                    let x = &packed.values[values + at * size..];
                    let (acc, ahead) = (&mut acc[first..first + size], ahead.next().unwrap_or_default());
                    // The first rows widen the weights that all share.
                    let weights = (index == 0).then_some(&weights);
                    match size {
                        1 => dot_group::<1>(x, weights, at, terms, &panel, acc, ahead),
                        2 => dot_group::<2>(x, weights, at, terms, &panel, acc, ahead),
                        4 => dot_group::<4>(x, weights, at, terms, &panel, acc, ahead),
                        _ => dot_group::<8>(x, weights, at, terms, &panel, acc, ahead),
                    }
                }
            }
        }
        for (group, acc) in acc.chunks_exact(rows).enumerate().take(groups) {
            let first = start + group * 2 * PAIRS;
            for (acc, out) in acc.iter().zip(out.chunks_exact_mut(outputs)) {
                for (pair, out) in acc.iter().zip(out[first..].chunks_mut(2)) {
                    for (out, sum) in out.iter_mut().zip(trees(*pair)) {
                        *out = sum;
                    }
                }
            }
        }
    }
}

/// Adds `terms` terms from `at` on to the lanes of `R` activation rows; with `weights`, the panel is filled on the way.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_group<const R: usize>(
    x: &[f32],
    weights: Option<&[&Source<'_>; 2 * PAIRS]>,
    at: usize,
    terms: usize,
    panel: &Panel,
    out: &mut [[__m512; PAIRS]],
    ahead: &[*const u8],
) {
    let Some(weights) = weights else { return dot_block::<R>(x, terms, panel, out, ahead, |_| {}) };
    let mut scales = [ZERO; PAIRS];
    for pair in 0..PAIRS {
        let (a, b) = (weights[2 * pair].scale(), weights[2 * pair + 1].scale());
        scales[pair] = _mm512_insertf32x8::<1>(_mm512_set1_ps(a), _mm256_set1_ps(b));
    }
    let from: [*const u8; 2 * PAIRS] = weights.map(|row| row.address(at).0);
    let (whole, rest) = (terms / LANES, terms % LANES);
    match weights[0] {
        Source::Bf16(_) => {
            if rest > 0 {
                let last = last_terms(weights.map(|row| row.bf16()), at, terms);
                // SAFETY: the padded copies hold eight values each.
                panel[whole].set(unsafe { widen_bf16(last.each_ref().map(|last| last.as_ptr()), 0) });
            }
            let from = from.map(<*const u8>::cast::<bf16>);
            dot_block::<R>(x, terms, panel, out, ahead, |step| {
                // SAFETY: step is below `whole`, so that each row has eight values there.
                panel[step].set(unsafe { widen_bf16(from, step * LANES) });
            });
        }
        Source::Scaled(..) => {
            let ties = weights.iter().any(|row| row.ties());
            if rest > 0 {
                let last = last_terms(weights.map(|row| row.codes()), at, terms);
                // SAFETY: the padded copies hold eight codes each.
                panel[whole].set(unsafe { widen_with_ties(last.each_ref().map(|last| last.as_ptr()), 0, scales) });
            }
            let from = from.map(<*const u8>::cast::<i8>);
            if ties {
                dot_block::<R>(x, terms, panel, out, ahead, |step| {
                    // SAFETY: step is below `whole`, so that each row has eight codes there.
                    panel[step].set(unsafe { widen_with_ties(from, step * LANES, scales) });
                });
            } else {
                dot_block::<R>(x, terms, panel, out, ahead, |step| {
                    // SAFETY: as above.
                    panel[step].set(unsafe { widen_scaled(from, step * LANES, scales) });
                });
            }
        }
    }
}

/// Eight values of each row from `at` on, widened, two rows a register.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn widen_bf16(rows: [*const bf16; 2 * PAIRS], at: usize) -> [__m512; PAIRS] {
    let mut widened = [ZERO; PAIRS];
    for pair in 0..PAIRS {
        // SAFETY: as the caller promises.
        let (a, b) = unsafe {
            let (a, b) = (rows[2 * pair].add(at), rows[2 * pair + 1].add(at));
            (_mm_loadu_si128(a.cast()), _mm_loadu_si128(b.cast()))
        };
        let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b);
        widened[pair] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(both)));
    }
    widened
}

/// `f32(code) * scale` of eight codes of a row from `at` on, and of those of another.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn products(rows: &[*const i8], at: usize, scale: __m512) -> __m512 {
    // SAFETY: as the caller promises.
    let (a, b) = unsafe { (_mm_loadl_epi64(rows[0].add(at).cast()), _mm_loadl_epi64(rows[1].add(at).cast())) };
    _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_unpacklo_epi64(a, b))), scale)
}

/// `BF16_RNE(f32(code) * scale)` of eight codes of each row from `at` on, widened, two rows a register, where no product
/// lies in the middle between two BF16 values: what is nearer to the next goes up.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn widen_scaled(rows: [*const i8; 2 * PAIRS], at: usize, scales: [__m512; PAIRS]) -> [__m512; PAIRS] {
    let (half, upper) = (_mm512_set1_epi32(0x8000), _mm512_set1_epi32(-65536));
    let mut widened = [ZERO; PAIRS];
    for pair in 0..PAIRS {
        // SAFETY: as the caller promises.
        let bits = _mm512_castps_si512(unsafe { products(&rows[2 * pair..], at, scales[pair]) });
        widened[pair] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(bits, half), upper));
    }
    widened
}

/// [`widen_scaled`] of any products. Veltkamp's splitting leaves the upper 8 of 24 bits, rounded to nearest, ties to even,
/// where neither overflow nor subnormal numbers come in its way.
///
/// # Safety
/// They must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn widen_with_ties(rows: [*const i8; 2 * PAIRS], at: usize, scales: [__m512; PAIRS]) -> [__m512; PAIRS] {
    let splitter = _mm512_set1_ps(65537.0);
    let mut widened = [ZERO; PAIRS];
    for pair in 0..PAIRS {
        // SAFETY: as the caller promises.
        let product = unsafe { products(&rows[2 * pair..], at, scales[pair]) };
        let spread = _mm512_mul_ps(product, splitter);
        widened[pair] = _mm512_sub_ps(spread, _mm512_sub_ps(spread, product));
    }
    widened
}

/// The terms after the last whole eight of each row, filled up with zeros.
fn last_terms<T: Copy + Default>(rows: [&[T]; 2 * PAIRS], at: usize, terms: usize) -> [[T; LANES]; 2 * PAIRS] {
    rows.map(|row| {
        let mut last = [T::default(); LANES];
        last[..terms % LANES].copy_from_slice(&row[at + terms - terms % LANES..at + terms]);
        last
    })
}

/// Adds a panel's products, those of a first and a second run, to the lanes of `R` activation rows and prefetches the
/// lines `ahead`. `widen` is called for every whole eight terms one step before they are added, so that multiply-adds do
/// not wait for it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_block<const R: usize>(
    x: &[f32],
    terms: usize,
    panel: &Panel,
    out: &mut [[__m512; PAIRS]],
    ahead: &[*const u8],
    widen: impl Fn(usize),
) {
    let (whole, steps) = (terms / LANES, terms.div_ceil(LANES));
    assert!(x.len() >= steps * R * LANES && out.len() == R && steps <= panel.len());
    if whole > 0 {
        widen(0);
    }
    let mut first = [[ZERO; PAIRS]; R];
    for run in 0..2 {
        let mut acc = [[ZERO; PAIRS]; R];
        for step in run * RUN..steps.min((run + 1) * RUN) {
            if let Some(&line) = ahead.get(step) {
                prefetch(line);
            }
            if step + 1 < whole {
                widen(step + 1);
            }
            let w = panel[step].get();
            for r in 0..R {
                // SAFETY: eight activations of row r, inside the slice by the assertion above.
                let x = unsafe { _mm256_loadu_ps(x.as_ptr().add((step * R + r) * LANES)) };
                let x = _mm512_broadcast_f32x8(x);
                for pair in 0..PAIRS {
                    acc[r][pair] = _mm512_fmadd_ps(x, w[pair], acc[r][pair]);
                }
            }
        }
        for r in 0..R {
            for pair in 0..PAIRS {
                if run == 0 {
                    first[r][pair] = acc[r][pair];
                } else {
                    out[r][pair] = _mm512_add_ps(out[r][pair], _mm512_add_ps(first[r][pair], acc[r][pair]));
                }
            }
        }
    }
    for &line in ahead.iter().skip(steps) {
        prefetch(line);
    }
}

/// The tree of adjacent pairs over the eight lanes of each half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(in crate::kernels) fn trees(lanes: __m512) -> [f32; 2] {
    let pairs = _mm512_add_ps(lanes, _mm512_permute_ps::<0b10_11_00_01>(lanes));
    let fours = _mm512_add_ps(pairs, _mm512_permute_ps::<0b01_00_11_10>(pairs));
    let eights = _mm512_add_ps(fours, _mm512_shuffle_f32x4::<0b10_11_00_01>(fours, fours));
    [_mm512_cvtss_f32(eights), _mm_cvtss_f32(_mm512_extractf32x4_ps::<2>(eights))]
}
