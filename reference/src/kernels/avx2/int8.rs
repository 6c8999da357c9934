//! INT8 products: the magnitude of a weight (128 at most, unsigned) is multiplied with the activation that has taken over its
//! sign; a pair of products is at most 2 * 128 * 127, which fits 16 bits, so that no sum saturates.

use std::arch::x86_64::*;
use std::array::from_fn;

use super::prefetch;
use super::staged::{LINE, STAGED, Stage};
use crate::kernels::aligned::Aligned;
use crate::kernels::level::Block;

#[target_feature(enable = "avx2,fma")]
pub(super) fn i8_outputs(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
    let (depth, outputs) = (w.width(), w.rows());
    if depth == 0 || outputs == 0 {
        return out.fill(0);
    }
    let stride = depth.next_multiple_of(32);
    let x = Aligned::rows(x, depth, 0, stride);
    // As many sums as there are registers for; four rows of weights are read faster than two.
    if x.len() <= 2 * stride { i8_blocks::<4>(&x, w, out) } else { i8_blocks::<2>(&x, w, out) }
}

/// Blocks of `J` outputs and up to four activation rows, the next outputs prefetched meanwhile.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn i8_blocks<const J: usize>(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
    let (stride, outputs) = (w.width().next_multiple_of(32), w.rows());
    for start in (0..outputs).step_by(J) {
        // Outputs past the last repeat it and are not stored.
        let rows = |start: usize| from_fn(|j| w.row((start + j).min(outputs - 1)));
        let (block, next): ([&[i8]; J], [&[i8]; J]) = (rows(start), rows(start + J));
        for (group, x) in x.chunks(4 * stride).enumerate() {
            // The first rows' turn is the time to prefetch.
            let next = if group == 0 { &next } else { &block };
            let sums = match x.len() / stride {
                1 => i8_block::<1, J>(x, stride, &block, next),
                2 => i8_block::<2, J>(x, stride, &block, next),
                3 => i8_block::<3, J>(x, stride, &block, next),
                _ => i8_block::<4, J>(x, stride, &block, next),
            };
            for (sums, out) in sums.iter().zip(out.chunks_exact_mut(outputs).skip(4 * group)) {
                out[start..].iter_mut().zip(sums).for_each(|(out, sum)| *out = *sum);
            }
        }
    }
}

/// The sums of `J` outputs over `R` activation rows.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn i8_block<const R: usize, const J: usize>(
    x: &[i8],
    stride: usize,
    w: &[&[i8]; J],
    next: &[&[i8]; J],
) -> [[i32; J]; 4] {
    let depth = w[0].len();
    assert!(x.len() >= R * stride && stride >= depth.next_multiple_of(32) && w.iter().all(|row| row.len() == depth));
    let ones = _mm256_set1_epi16(1);
    let mut acc = [[_mm256_setzero_si256(); R]; J];
    let step = |acc: &mut [[__m256i; R]; J], k: usize, w: [__m256i; J]| {
        for r in 0..R {
            // SAFETY: x holds R rows of `stride` codes, which is a multiple of 32 and not below depth.
            let x = unsafe { _mm256_load_si256(x.as_ptr().add(r * stride + k).cast()) };
            for j in 0..J {
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), _mm256_sign_epi8(x, w[j]));
                acc[j][r] = _mm256_add_epi32(acc[j][r], _mm256_madd_epi16(pairs, ones));
            }
        }
    };
    let whole = depth - depth % 32;
    for k in (0..whole).step_by(32) {
        let mut weights = [ones; J];
        for j in 0..J {
            prefetch(next[j].as_ptr().wrapping_add(k));
            // SAFETY: k + 32 <= depth, the length of every row of w.
            weights[j] = unsafe { _mm256_loadu_si256(w[j].as_ptr().add(k).cast()) };
        }
        step(&mut acc, k, weights);
    }
    if whole < depth {
        let mut weights = [ones; J];
        for j in 0..J {
            let mut last = [0i8; 32];
            last[..depth - whole].copy_from_slice(&w[j][whole..]);
            // SAFETY: 32 codes.
            weights[j] = unsafe { _mm256_loadu_si256(last.as_ptr().cast()) };
        }
        step(&mut acc, whole, weights);
    }
    let mut sums = [[0; J]; 4];
    for r in 0..R {
        for j in 0..J {
            let half = _mm_add_epi32(_mm256_castsi256_si128(acc[j][r]), _mm256_extracti128_si256::<1>(acc[j][r]));
            let quarter = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
            let one = _mm_add_epi32(quarter, _mm_shuffle_epi32::<1>(quarter));
            sums[r][j] = _mm_cvtsi128_si32(one);
        }
    }
    sums
}

/// Two terms' weights of each of 32 columns as 16-bit pairs, eight columns a register.
type I8Panel = [[__m256i; 4]; STAGED / 2];

#[target_feature(enable = "avx2,fma")]
pub(super) fn i8_columns(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
    let (depth, width) = (w.rows(), w.width());
    if depth == 0 || width == 0 {
        return out.fill(0);
    }
    let rows = x.len() / depth;
    let blocks = width.div_ceil(LINE);
    // Activations as 16-bit numbers, padded to whole pairs with zeros, which add nothing.
    let padded = depth.next_multiple_of(2);
    let wide: Vec<i16> = x.iter().map(|&code| i16::from(code)).collect();
    let codes = Aligned::rows(&wide, depth, 0, padded);
    let row = |k: usize| w.as_ptr().wrapping_offset(k as isize * w.stride()).cast::<u8>();
    let mut stage = Stage::new(width);
    let mut panel: I8Panel = [[_mm256_setzero_si256(); 4]; STAGED / 2];
    // [block][row][4 registers of 8 columns]
    let mut acc = vec![[_mm256_setzero_si256(); 4]; blocks * rows];
    for start in (0..depth).step_by(STAGED) {
        let terms = STAGED.min(depth - start);
        // SAFETY: rows start..start + terms of the block are `width` bytes long.
        unsafe { stage.fill(terms, width, |k| row(start + k)) };
        for (block, acc) in acc.chunks_exact_mut(rows).enumerate() {
            let pairs = pack(stage.block(block), terms, &mut panel);
            let mut first = 0;
            while first < rows {
                let (codes, acc) = (&codes[first * padded + start..], &mut acc[first..]);
                first += match acc.len() {
                    1 => i8_packed::<1>(codes, padded, pairs, &panel, acc),
                    _ => i8_packed::<2>(codes, padded, pairs, &panel, acc),
                };
            }
        }
    }
    for row in 0..rows {
        for (block, out) in out[row * width..(row + 1) * width].chunks_mut(LINE).enumerate() {
            let mut sums = [0i32; LINE];
            for (j, register) in acc[block * rows + row].into_iter().enumerate() {
                // SAFETY: eight lanes are stored into eight elements.
                unsafe { _mm256_storeu_si256(sums[j * 8..j * 8 + 8].as_mut_ptr().cast(), register) };
            }
            for (n, out) in out.iter_mut().enumerate() {
                // Registers 2h and 2h + 1 hold columns 16h..16h + 16: the first the lower four of each eight.
                let (half, eight, upper, lane) = (n / 16, n % 16 / 8, n % 8 / 4, n % 4);
                *out = sums[(2 * half + upper) * 8 + eight * 4 + lane];
            }
        }
    }
}

/// Packs the lines of a block in pairs of terms; returns how many pairs. Lines past the last term hold anything: their
/// activations are zero.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn pack(lines: &[u8], terms: usize, panel: &mut I8Panel) -> usize {
    let pairs = terms.div_ceil(2);
    for (two, panel) in lines.chunks_exact(2 * LINE).zip(panel).take(pairs) {
        for half in 0..2 {
            // SAFETY: two lines of twice 16 codes.
            let (a, b) = unsafe {
                let at = two.as_ptr().add(half * 16);
                (_mm_loadu_si128(at.cast()), _mm_loadu_si128(at.add(LINE).cast()))
            };
            let (a, b) = (_mm256_cvtepi8_epi16(a), _mm256_cvtepi8_epi16(b));
            panel[2 * half] = _mm256_unpacklo_epi16(a, b);
            panel[2 * half + 1] = _mm256_unpackhi_epi16(a, b);
        }
    }
    pairs
}

/// Adds a panel's products to the sums of `R` activation rows; returns `R`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn i8_packed<const R: usize>(
    codes: &[i16],
    stride: usize,
    pairs: usize,
    panel: &I8Panel,
    out: &mut [[__m256i; 4]],
) -> usize {
    assert!(codes.len() >= (R - 1) * stride + pairs * 2);
    let out = &mut out[..R];
    let mut acc = [[_mm256_setzero_si256(); 4]; R];
    for r in 0..R {
        acc[r] = out[r];
    }
    for (pair, w) in panel[..pairs].iter().enumerate() {
        for r in 0..R {
            // SAFETY: two codes of row r, inside the slice by the assertion above.
            let two = unsafe { codes.as_ptr().add(r * stride + pair * 2).cast::<i32>().read_unaligned() };
            let x = _mm256_set1_epi32(two);
            for j in 0..4 {
                acc[r][j] = _mm256_add_epi32(acc[r][j], _mm256_madd_epi16(w[j], x));
            }
        }
    }
    for r in 0..R {
        out[r] = acc[r];
    }
    R
}
