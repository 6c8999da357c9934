//! The AVX2 level, with FMA. INT8 products multiply the magnitude of a weight (128 at most, unsigned) with the activation
//! that has taken over its sign; a pair of them is at most 2 * 128 * 127, which fits 16 bits, so that no sum saturates.
//! FP32 sums hold the eight canonical lanes of an output in one register, or one lane of eight columns. Weights are
//! widened into a small panel that all activation rows share.

// Blocks of registers are copied one by one: as slices they would be copied through memory.
#![allow(clippy::manual_memcpy)]

use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::Range;

use half::bf16;

use super::aligned::Aligned;
use super::level::{Block, Kernels, ValueTile, Weighted};
use super::packed::Packed;
use super::plain::Plain;
use super::sum::{LANES, RUN, RUNS};
use super::upcoming::Upcoming;

/// AVX2 with FMA.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// The level, where the CPU has it.
    #[must_use]
    pub fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

impl Kernels for Avx2 {
    fn name(&self) -> &'static str {
        "avx2"
    }

    fn needs(&self) -> &'static str {
        "AVX2 and FMA"
    }

    fn i8_outputs(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
        // SAFETY: a value of this type exists only where the CPU has these instructions.
        unsafe { i8_outputs(x, w, out) }
    }

    fn i8_columns(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
        // SAFETY: as above.
        unsafe { i8_columns(x, w, out) }
    }

    fn bf16_outputs(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { dots(x, w.width(), w.rows(), |n| Source::Bf16(w.row(n)), out) }
    }

    fn bf16_columns(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { columns(x, w, out) }
    }

    fn scaled_outputs(&self, x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) {
        if !splits(scale) {
            return Plain.scaled_outputs(x, w, scale, out);
        }
        // SAFETY: as above.
        unsafe { dots(x, w.width(), w.rows(), |n| Source::scaled(w.row(n), scale[n]), out) }
    }

    fn scores(&self, q: &[f32], keys: &[&[bf16]], upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { scores(q, keys, upcoming, out) }
    }

    fn weighted(&self, values: Weighted<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { weighted(values, upcoming, out) }
    }

    fn i8_burst(&self, steps: u64) -> u64 {
        // SAFETY: as above.
        unsafe { i8_burst(steps) }
    }

    fn f32_burst(&self, steps: u64) -> u64 {
        // SAFETY: as above.
        unsafe { f32_burst(steps) }
    }
}

#[target_feature(enable = "avx2,fma")]
fn i8_outputs(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
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

/// Terms of a product by columns that are staged together.
const STAGED: usize = RUNS;
/// Bytes of a row that a block of columns holds.
const LINE: usize = 32;
/// Bytes from one block of a [`Stage`] to the next: one more line than is used, so that blocks do not share cache sets.
const BLOCK_BYTES: usize = (STAGED + 1) * LINE;

/// Part of a weight matrix that lies term by term, copied out of it so that each run of 32 bytes lies beside that of
/// the next term. Rows are read in long runs, a few at a time, which is what memory is fast at.
struct Stage {
    lines: Aligned<u8>,
}

impl Stage {
    /// Room for rows of `bytes`.
    fn new(bytes: usize) -> Self {
        Self { lines: Aligned::zeros(bytes.div_ceil(LINE) * BLOCK_BYTES) }
    }

    /// Copies `terms` rows of `bytes` each; `row(k)` is where row `k` begins.
    ///
    /// # Safety
    /// `bytes` must be readable from every `row(0..terms)` on.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn fill(&mut self, terms: usize, bytes: usize, row: impl Fn(usize) -> *const u8) {
        assert!(terms <= STAGED && bytes.div_ceil(LINE) * BLOCK_BYTES <= self.lines.len());
        for first in (0..terms).step_by(4) {
            for block in 0..bytes / LINE {
                for k in first..terms.min(first + 4) {
                    // SAFETY: the line is inside the row and, as asserted above, inside `lines`.
                    unsafe {
                        let line = _mm256_loadu_si256(row(k).add(block * LINE).cast());
                        let to = self.lines.as_mut_ptr().add(block * BLOCK_BYTES + k * LINE);
                        _mm256_store_si256(to.cast(), line);
                    }
                }
            }
        }
        let (whole, rest) = (bytes / LINE, bytes % LINE);
        for k in 0..if rest > 0 { terms } else { 0 } {
            // SAFETY: the last bytes of the row.
            let last = unsafe { std::slice::from_raw_parts(row(k).add(whole * LINE), rest) };
            self.lines[whole * BLOCK_BYTES + k * LINE..][..rest].copy_from_slice(last);
        }
    }

    /// The lines of a block, 32 bytes a term.
    #[inline(always)]
    fn block(&self, block: usize) -> &[u8] {
        &self.lines[block * BLOCK_BYTES..][..STAGED * LINE]
    }
}

/// Two terms' weights of each of 32 columns as 16-bit pairs, eight columns a register.
type I8Panel = [[__m256i; 4]; STAGED / 2];

#[target_feature(enable = "avx2,fma")]
fn i8_columns(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
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

/// A row of weights before it is widened.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// BF16.
    Bf16(&'a [bf16]),
    /// INT8 codes, their scale, and whether a product of it may lie in the middle between two BF16 values.
    Scaled(&'a [i8], f32, bool),
}

impl<'a> Source<'a> {
    /// INT8 codes and their scale.
    fn scaled(row: &'a [i8], scale: f32) -> Self {
        Self::Scaled(row, scale, has_ties(scale))
    }

    fn bf16(&self) -> &'a [bf16] {
        if let Self::Bf16(row) = self { row } else { &[] }
    }

    fn codes(&self) -> &'a [i8] {
        if let Self::Scaled(row, ..) = self { row } else { &[] }
    }

    fn scale(&self) -> f32 {
        if let Self::Scaled(_, scale, _) = self { *scale } else { 1.0 }
    }
}

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
fn dots<'a>(x: &[f32], depth: usize, outputs: usize, source: impl Fn(usize) -> Source<'a>, out: &mut [f32]) {
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
        let ties = block.iter().any(|source| matches!(source, Source::Scaled(.., true)));
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

/// The tree of adjacent pairs over eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn tree(lanes: __m256) -> f32 {
    let pairs = _mm256_add_ps(lanes, _mm256_permute_ps::<0b10_11_00_01>(lanes));
    let fours = _mm256_add_ps(pairs, _mm256_permute_ps::<0b01_00_11_10>(pairs));
    _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(fours), _mm256_extractf128_ps::<1>(fours)))
}

/// Widened weights of 16 columns.
type ColumnPanel = [[__m256; 2]; STAGED];

/// Sixteen columns of a lane and a row: what the lane has, and the first of two runs.
type ColumnSums = [[__m256; 2]; 2];

/// Products with weights that lie term by term: term `k` goes to lane `k % 8`. What is staged together is one run.
#[target_feature(enable = "avx2,fma")]
fn columns(x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
    let (depth, width) = (w.rows(), w.width());
    if depth == 0 || width == 0 {
        return out.fill(0.0);
    }
    let rows = x.len() / depth;
    let (bytes, blocks) = (2 * width, width.div_ceil(16));
    let row = |k: usize| w.as_ptr().wrapping_offset(k as isize * w.stride()).cast::<u8>();
    let mut stage = Stage::new(bytes);
    let mut panel: ColumnPanel = [[_mm256_setzero_ps(); 2]; STAGED];
    // [block][lane][row]
    let mut acc: Vec<ColumnSums> = vec![[[_mm256_setzero_ps(); 2]; 2]; blocks * LANES * rows];
    for at in (0..depth).step_by(STAGED) {
        let (terms, second) = (STAGED.min(depth - at), at / STAGED % 2 == 1);
        // SAFETY: rows at..at + terms of the block are `bytes` long.
        unsafe { stage.fill(terms, bytes, |k| row(at + k)) };
        for (block, acc) in acc.chunks_exact_mut(LANES * rows).enumerate() {
            for (line, panel) in stage.block(block).chunks_exact(LINE).zip(&mut panel).take(terms) {
                for half in 0..2 {
                    // SAFETY: a line is twice 16 bytes.
                    let eight = unsafe { _mm_loadu_si128(line.as_ptr().add(half * 16).cast()) };
                    panel[half] = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight)));
                }
            }
            for (lane, acc) in acc.chunks_exact_mut(rows).enumerate() {
                let mut first = 0;
                while first < rows {
                    let (x, acc) = (&x[first * depth + at..], &mut acc[first..]);
                    first += match acc.len() {
                        1 => column_block::<1>(x, depth, lane, terms, &panel, acc, second),
                        2 | 3 => column_block::<2>(x, depth, lane, terms, &panel, acc, second),
                        _ => column_block::<4>(x, depth, lane, terms, &panel, acc, second),
                    };
                }
            }
        }
    }
    for (block, acc) in acc.chunks_exact_mut(LANES * rows).enumerate() {
        let columns = block * 16..width.min(block * 16 + 16);
        if depth.div_ceil(STAGED) % 2 == 1 {
            for [sum, first] in &mut *acc {
                *sum = [_mm256_add_ps(sum[0], first[0]), _mm256_add_ps(sum[1], first[1])];
            }
        }
        let mut live = LANES;
        while live > 1 {
            live /= 2;
            for lane in 0..live {
                for row in 0..rows {
                    let ([a, _], [b, _]) = (acc[2 * lane * rows + row], acc[(2 * lane + 1) * rows + row]);
                    acc[lane * rows + row][0] = [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])];
                }
            }
        }
        for (row, [sums, _]) in acc[..rows].iter().enumerate() {
            let mut values = [0f32; 16];
            // SAFETY: two registers are stored into two times eight elements.
            unsafe {
                _mm256_storeu_ps(values.as_mut_ptr(), sums[0]);
                _mm256_storeu_ps(values[8..].as_mut_ptr(), sums[1]);
            }
            out[row * width..][columns.clone()].copy_from_slice(&values[..columns.len()]);
        }
    }
}

/// The run of one lane for `R` activation rows, kept when it is the first and added with the first when it is the
/// second; returns `R`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn column_block<const R: usize>(
    x: &[f32],
    stride: usize,
    lane: usize,
    terms: usize,
    panel: &ColumnPanel,
    out: &mut [ColumnSums],
    second: bool,
) -> usize {
    assert!(x.len() >= (R - 1) * stride + terms && terms <= STAGED);
    let out = &mut out[..R];
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    for k in (lane..terms).step_by(LANES) {
        let w = panel[k];
        for r in 0..R {
            // SAFETY: the activation of row r and term k, inside the slice by the assertion above.
            let x = _mm256_set1_ps(unsafe { *x.as_ptr().add(r * stride + k) });
            acc[r] = [_mm256_fmadd_ps(x, w[0], acc[r][0]), _mm256_fmadd_ps(x, w[1], acc[r][1])];
        }
    }
    for r in 0..R {
        if second {
            let [sum, first] = out[r];
            let both = |half: usize| _mm256_add_ps(first[half], acc[r][half]);
            out[r][0] = [_mm256_add_ps(sum[0], both(0)), _mm256_add_ps(sum[1], both(1))];
        } else {
            out[r][1] = acc[r];
        }
    }
    R
}

/// Calls a function whose parameter is the number of rows, five at most.
macro_rules! up_to_five {
    ($rows:expr, $function:ident($($argument:expr),*)) => {
        match $rows {
            1 => $function::<1>($($argument),*),
            2 => $function::<2>($($argument),*),
            3 => $function::<3>($($argument),*),
            4 => $function::<4>($($argument),*),
            _ => $function::<5>($($argument),*),
        }
    };
}
pub(super) use up_to_five;

/// [`Kernels::scores`]: two keys are widened on the way and meet up to five queries each.
#[target_feature(enable = "avx2,fma")]
pub(super) fn scores(q: &[f32], keys: &[&[bf16]], upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
    let Some(dim) = keys.first().map(|key| key.len()).filter(|&dim| dim > 0) else { return out.fill(0.0) };
    if dim > RUNS {
        // More than the one run of a lane that these loops add.
        return Plain.scores(q, keys, upcoming, out);
    }
    assert!(keys.iter().all(|key| key.len() == dim));
    let tokens = keys.len();
    for (group, (q, out)) in q.chunks(5 * dim).zip(out.chunks_mut(5 * tokens)).enumerate() {
        for (pair, token) in keys.chunks(2).zip((0..tokens).step_by(2)) {
            if group == 0 && token % 4 == 0 {
                upcoming.fetch(3);
            }
            // An odd key meets itself and is stored once.
            let pair = [pair[0], pair[pair.len() - 1]];
            up_to_five!(q.len() / dim, score_block(q, pair, token, tokens, out))
        }
    }
}

/// The scores of `R` queries and two keys.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn score_block<const R: usize>(q: &[f32], keys: [&[bf16]; 2], token: usize, tokens: usize, out: &mut [f32]) {
    let dim = keys[0].len();
    assert!(q.len() >= R * dim && keys[1].len() == dim);
    let whole = dim - dim % LANES;
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    for d in (0..whole).step_by(LANES) {
        // SAFETY: d + 8 <= dim, the length of the keys and of each of the R queries.
        unsafe {
            let k = keys.map(|key| widen_eight(&*key.as_ptr().add(d).cast()));
            for r in 0..R {
                let q = _mm256_loadu_ps(q.as_ptr().add(r * dim + d));
                acc[r] = [_mm256_fmadd_ps(q, k[0], acc[r][0]), _mm256_fmadd_ps(q, k[1], acc[r][1])];
            }
        }
    }
    for r in 0..R {
        for (j, key) in keys.iter().enumerate() {
            let sum = if whole == dim {
                tree(acc[r][j])
            } else {
                let mut lanes = [0f32; LANES];
                // SAFETY: eight lanes into eight elements.
                unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), acc[r][j]) };
                for d in whole..dim {
                    lanes[d - whole] = q[r * dim + d].mul_add(key[d].to_f32(), lanes[d - whole]);
                }
                super::sum::tree(&mut lanes)
            };
            if token + j < tokens {
                // A run of -0 makes a lane +0.
                out[r * tokens + token + j] = sum + 0.0;
            }
        }
    }
}

/// [`Kernels::weighted`]: sixteen columns of the values at a time, up to five rows of weights each.
#[target_feature(enable = "avx2,fma")]
pub(super) fn weighted(values: Weighted<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
    values.by_rows(5, upcoming, out, |rows, upcoming, out| {
        up_to_five!(rows.factors.len(), weighted_rows(rows, upcoming, out))
    });
}

/// `R` rows of weights and all columns, sixteen at a time and the last plainly.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn weighted_rows<const R: usize>(tile: ValueTile<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
    let ValueTile { p, stride, factors, values } = tile;
    let dim = values[0].len();
    assert!(p.len() >= (R - 1) * stride + values.len() && out.len() >= R * dim);
    assert!(values.iter().all(|value| value.len() == dim));
    let whole = dim - dim % 16;
    for d in (0..whole).step_by(16) {
        upcoming.fetch(3 * values.len() / 4 * 16 / dim);
        let mut acc = [[_mm256_setzero_ps(); 2]; R];
        for (t, value) in values.iter().enumerate() {
            // SAFETY: sixteen values from d on, and the weight of row r and token t, inside by the assertions above.
            unsafe {
                let v = [d, d + LANES].map(|d| widen_eight(&*value.as_ptr().add(d).cast()));
                for r in 0..R {
                    let p = _mm256_broadcast_ss(&*p.as_ptr().add(r * stride + t));
                    acc[r] = [_mm256_fmadd_ps(p, v[0], acc[r][0]), _mm256_fmadd_ps(p, v[1], acc[r][1])];
                }
            }
        }
        for r in 0..R {
            let [a, c] = factors[r].map(|factor| _mm256_set1_ps(factor));
            for half in 0..2 {
                // SAFETY: eight columns of row r, inside by the assertion above.
                unsafe {
                    let out = out.as_mut_ptr().add(r * dim + d + 8 * half);
                    let sum = _mm256_mul_ps(acc[r][half], c);
                    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(out), a), sum));
                }
            }
        }
    }
    for ((p, [a, c]), out) in p.chunks(stride).zip(factors).zip(out.chunks_exact_mut(dim)) {
        for d in whole..dim {
            let sum = p.iter().zip(values).fold(0.0, |sum, (p, value)| p.mul_add(value[d].to_f32(), sum));
            out[d] = out[d] * a + sum * c;
        }
    }
}

/// Eight BF16 values, widened.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn widen_eight(eight: &[bf16; LANES]) -> __m256 {
    // SAFETY: eight values are 128 bits.
    let eight = unsafe { _mm_loadu_si128(eight.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight)))
}

/// Whether the product of a scale and some code lies in the middle between two BF16 values. Those of a code and of its
/// double do both or neither.
pub(super) fn has_ties(scale: f32) -> bool {
    let product = |code: u16| f32::from(code) * scale;
    (0..64).fold(false, |ties, half| ties | (product(2 * half + 1).to_bits() & 0xffff == 0x8000))
}

/// Whether Veltkamp's splitting rounds the products of these scales and any code: where neither overflow nor subnormal
/// numbers come in its way.
pub(super) fn splits(scale: &[f32]) -> bool {
    scale.iter().all(|&scale| scale == 0.0 || (1e-30..1e30).contains(&scale.abs()))
}

/// Asks for a cache line in the second level: lines of different rows often share the few sets of the first.
#[inline(always)]
pub(super) fn prefetch<T>(address: *const T) {
    // Not an unsafe function in every release of the standard library.
    #[allow(unused_unsafe)]
    // SAFETY: prefetching reads nothing and never faults, whatever the address.
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
}

/// Independent accumulators that hide the latency of a multiply-add.
const CHAINS: usize = 12;

#[target_feature(enable = "avx2,fma")]
fn i8_burst(steps: u64) -> u64 {
    let mut acc: [__m256i; CHAINS] = from_fn(|i| _mm256_set1_epi32(i as i32));
    let (x, w, ones) = std::hint::black_box((_mm256_set1_epi8(3), _mm256_set1_epi8(5), _mm256_set1_epi16(1)));
    for _ in 0..steps {
        for acc in &mut acc {
            // The shortest exact sequence: one factor is the accumulator's own bits, so that nothing is hoisted.
            let pairs = _mm256_maddubs_epi16(w, _mm256_xor_si256(x, *acc));
            *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(pairs, ones));
        }
    }
    std::hint::black_box(acc);
    steps * (CHAINS * 32) as u64
}

#[target_feature(enable = "avx2,fma")]
fn f32_burst(steps: u64) -> u64 {
    let mut acc: [__m256; CHAINS] = from_fn(|i| _mm256_set1_ps(i as f32));
    let (x, w) = std::hint::black_box((_mm256_set1_ps(0.5), _mm256_set1_ps(1.0)));
    for _ in 0..steps {
        for acc in &mut acc {
            *acc = _mm256_fmadd_ps(*acc, x, w);
        }
    }
    std::hint::black_box(acc);
    steps * (CHAINS * 8) as u64
}
