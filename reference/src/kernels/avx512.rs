//! The AVX-512 level. INT8 products use VNNI: weights become unsigned by flipping their sign bit (`w + 128`), and 128
//! times the sum of the activations is taken off at the end; for more than a few activation rows they are turned into
//! registers of sixteen outputs. FP32 sums keep the eight canonical lanes: a register holds
//! the lanes of two outputs side by side, or one lane of sixteen columns. Weights are widened into a small panel that
//! all activation rows share, and what comes next is prefetched meanwhile.

// Blocks of registers are copied one by one: as slices they would be copied through memory.
#![allow(clippy::manual_memcpy)]

use std::arch::x86_64::*;
use std::array::from_fn;
use std::cell::Cell;

use half::bf16;

use super::aligned::Aligned;
use super::avx2::{self, prefetch, up_to_five};
use super::level::{Block, Kernels, ValueTile, Weighted};
use super::packed::Packed;
use super::plain::Plain;
use super::sum::{LANES, RUN, RUNS};
use super::upcoming::Upcoming;

/// AVX-512 with VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    /// The level, where the CPU has it.
    #[must_use]
    pub fn new() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma");
        has.then_some(Self(()))
    }
}

impl Kernels for Avx512 {
    fn name(&self) -> &'static str {
        "avx512"
    }

    fn needs(&self) -> &'static str {
        "AVX-512 F, BW, DQ, VL and VNNI"
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
        if !avx2::splits(scale) {
            return Plain.scaled_outputs(x, w, scale, out);
        }
        // SAFETY: as above.
        unsafe {
            dots(x, w.width(), w.rows(), |n| Source::Scaled(w.row(n), scale[n], avx2::has_ties(scale[n])), out);
        }
    }

    fn scores(&self, q: &[f32], keys: &[&[bf16]], upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
        if keys.first().is_none_or(|key| key.len() % LANES != 0 || key.len() > RUNS) {
            // SAFETY: a CPU with AVX-512 has AVX2 and FMA.
            return unsafe { avx2::scores(q, keys, upcoming, out) };
        }
        // SAFETY: as above.
        unsafe { scores(q, keys, upcoming, out) }
    }

    fn weighted(&self, values: Weighted<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
        if !values.dim().is_multiple_of(COLUMNS) {
            // SAFETY: a CPU with AVX-512 has AVX2 and FMA.
            return unsafe { avx2::weighted(values, upcoming, out) };
        }
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

/// Sixteen zeros.
// SAFETY: all bits zero are sixteen zeros.
pub(super) const ZERO: __m512 = unsafe { std::mem::zeroed() };

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i8_outputs(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
    if w.width() == 0 || w.rows() == 0 {
        return out.fill(0);
    }
    match x.len() / w.width() {
        1 => i8_few_rows::<1>(x, w, out),
        2 => i8_few_rows::<2>(x, w, out),
        3 => i8_few_rows::<3>(x, w, out),
        4 => i8_few_rows::<4>(x, w, out),
        _ => i8_many_rows(x, w, out),
    }
}

/// Some rows of weights in cache lines of 64 codes, which are as the block's first row lies: rows that are whole lines apart
/// are read without a load that crosses two.
struct Lines<'a, const N: usize> {
    rows: [&'a [i8]; N],
    /// Where in its first line a row begins.
    shift: usize,
}

impl<'a, const N: usize> Lines<'a, N> {
    /// The rows from `start` on; where there are no more, the last once more.
    fn of(w: Block<'a, i8>, start: usize) -> Self {
        let mut rows = [[].as_slice(); N];
        for (n, row) in (start..).zip(&mut rows) {
            *row = w.row(n.min(w.rows() - 1));
        }
        Self { rows, shift: shift(w) }
    }

    /// Where a line of a row lies.
    #[inline(always)]
    fn address(&self, row: usize, line: usize) -> *const i8 {
        self.rows[row].as_ptr().wrapping_sub(self.shift).wrapping_add(line * 64)
    }

    /// A line of each row, made unsigned. What is not the row's is anything, and has to meet zeros.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn unsigned(&self, line: usize) -> [__m512i; N] {
        let depth = self.rows[0].len();
        assert!(self.rows.iter().all(|row| row.len() == depth) && line * 64 < self.shift + depth);
        let mut mask = if line == 0 { u64::MAX << self.shift } else { u64::MAX };
        let rest = self.shift + depth - line * 64;
        if rest < 64 {
            mask &= (1 << rest) - 1;
        }
        let mut codes = [_mm512_set1_epi8(-128); N];
        for (row, codes) in codes.iter_mut().enumerate() {
            // SAFETY: the mask leaves only codes of the row.
            *codes = _mm512_xor_si512(*codes, unsafe { _mm512_maskz_loadu_epi8(mask, self.address(row, line)) });
        }
        codes
    }
}

/// Where in a cache line the first row of a block begins.
fn shift(w: Block<'_, i8>) -> usize {
    w.as_ptr().addr() % 64
}

/// Up to four activation rows: four outputs at a time over all terms, the next four prefetched meanwhile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i8_few_rows<const R: usize>(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
    const J: usize = 4;
    let (depth, outputs) = (w.width(), w.rows());
    let stride = (shift(w) + depth).next_multiple_of(64);
    let codes = Aligned::rows(x, depth, shift(w), stride);
    assert!(codes.len() == R * stride);
    let mut offsets = [0; R];
    for (offset, x) in offsets.iter_mut().zip(x.chunks_exact(depth)) {
        *offset = unsigned_offset(x);
    }
    let mut lines = Lines::<J>::of(w, 0);
    for start in (0..outputs).step_by(J) {
        let next = Lines::<J>::of(w, start + J);
        let mut acc = [[_mm512_setzero_si512(); J]; R];
        for line in 0..stride / 64 {
            let weights = lines.unsigned(line);
            for j in 0..J {
                prefetch(next.address(j, line));
            }
            for r in 0..R {
                // SAFETY: line by line, row r has `stride` codes.
                let x = unsafe { _mm512_load_si512(codes.as_ptr().add(r * stride + line * 64).cast()) };
                for j in 0..J {
                    acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], weights[j], x);
                }
            }
        }
        for r in 0..R {
            for (out, sum) in out[r * outputs..][start..outputs].iter_mut().zip(add_lanes(acc[r])) {
                *out = sum.wrapping_sub(offsets[r]);
            }
        }
        lines = next;
    }
}

/// Outputs of a register of sums in [`i8_many_rows`].
const I8_OUTPUTS: usize = 16;
/// Lines of weights that are turned together.
const I8_LINES: usize = 2;
/// Activation rows whose sums are in registers together.
const I8_ROWS: usize = 16;

/// Turned weights: four terms of sixteen outputs a register, the terms of a line after one another.
type I8Lines = [[__m512i; 16]; I8_LINES];

/// More activation rows. Weights are turned on their way, so that a register has the same four terms of sixteen outputs
/// and meets those four of each activation row. Then hardly anything but the weights is read into the first cache level,
/// which leaves its ways to memory to them; the next outputs are prefetched evenly.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i8_many_rows(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
    let (depth, outputs) = (w.width(), w.rows());
    let count = (shift(w) + depth).div_ceil(64);
    let groups: Vec<I8Group> = x.chunks(I8_ROWS * depth).map(|x| I8Group::new(x, depth, shift(w))).collect();
    let mut acc = vec![[_mm512_setzero_si512(); I8_ROWS]; groups.len()];
    let mut panel: I8Lines = [[_mm512_setzero_si512(); 16]; I8_LINES];
    let mut lines = Lines::<I8_OUTPUTS>::of(w, 0);
    for start in (0..outputs).step_by(I8_OUTPUTS) {
        let next = Lines::<I8_OUTPUTS>::of(w, start + I8_OUTPUTS);
        acc.fill([_mm512_setzero_si512(); I8_ROWS]);
        for first in (0..count).step_by(I8_LINES) {
            let some = I8_LINES.min(count - first);
            for (line, panel) in panel[..some].iter_mut().enumerate() {
                *panel = turned(lines.unsigned(first + line));
            }
            for (index, (group, acc)) in groups.iter().zip(&mut acc).enumerate() {
                // The first rows' turn is the time to prefetch.
                let next = (index == 0).then_some(&next);
                match group.rows {
                    8 => i8_turned::<8>(&group.codes, &panel[..some], first, next, acc),
                    _ => i8_turned::<I8_ROWS>(&group.codes, &panel[..some], first, next, acc),
                }
            }
        }
        let mask = u16::MAX >> (16 - (outputs - start).min(16));
        let (sums, out) = (groups.iter().zip(&acc), &mut out[start..]);
        let sums = sums.flat_map(|(group, acc)| group.offsets.iter().zip(acc));
        for ((offset, sum), out) in sums.zip(out.chunks_mut(outputs)) {
            // SAFETY: the mask leaves the outputs that there are.
            unsafe {
                _mm512_mask_storeu_epi32(out.as_mut_ptr(), mask, _mm512_sub_epi32(*sum, _mm512_set1_epi32(*offset)));
            }
        }
        lines = next;
    }
}

/// Activation rows of [`i8_many_rows`].
struct I8Group {
    /// Rows with those of zeros that fill it up.
    rows: usize,
    /// Lines of codes as the weights have them, line by line and row by row.
    codes: Aligned<i8>,
    /// What to take off the sums of each row.
    offsets: Vec<i32>,
}

impl I8Group {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn new(x: &[i8], depth: usize, shift: usize) -> Self {
        let (rows, stride) = ((x.len() / depth).next_multiple_of(8), (shift + depth).next_multiple_of(64));
        let mut codes = Aligned::zeros(rows * stride);
        for (r, row) in Aligned::rows(x, depth, shift, stride).chunks_exact(stride).enumerate() {
            for (line, row) in row.as_chunks::<64>().0.iter().enumerate() {
                codes[(line * rows + r) * 64..][..64].copy_from_slice(row);
            }
        }
        Self { rows, codes, offsets: x.chunks_exact(depth).map(|row| unsigned_offset(row)).collect() }
    }
}

/// Adds the products of turned lines, from line `first` on, to the sums of `R` activation rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i8_turned<const R: usize>(
    codes: &[i8],
    panel: &[[__m512i; 16]],
    first: usize,
    next: Option<&Lines<'_, I8_OUTPUTS>>,
    out: &mut [__m512i; I8_ROWS],
) {
    let codes = &codes[first * R * 64..][..panel.len() * R * 64];
    let mut acc = [_mm512_setzero_si512(); R];
    acc.copy_from_slice(&out[..R]);
    for (line, weights) in panel.iter().enumerate() {
        for four in 0..16 {
            if let Some(next) = next {
                prefetch(next.address(four, first + line));
            }
            for r in 0..R {
                // SAFETY: four codes of the line of row r.
                let x = unsafe { codes.as_ptr().add((line * R + r) * 64 + four * 4).cast::<i32>().read_unaligned() };
                acc[r] = _mm512_dpbusd_epi32(acc[r], weights[four], _mm512_set1_epi32(x));
            }
        }
    }
    out[..R].copy_from_slice(&acc);
}

/// Sixteen rows of sixteen 32-bit values, columns for rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn turned(rows: [__m512i; 16]) -> [__m512i; 16] {
    // Of four rows, in each quarter the first, second, third and fourth value of all four.
    let mut fours = [[_mm512_setzero_si512(); 4]; 4];
    for (fours, rows) in fours.iter_mut().zip(rows.as_chunks::<4>().0) {
        let [a, b, c, d] = *rows;
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        *fours = [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ];
    }
    let mut columns = [_mm512_setzero_si512(); 16];
    for value in 0..4 {
        // The quarters of four registers, columns for rows.
        let [a, b, c, d] = fours.map(|four| four[value]);
        let (ab, cd) = (_mm512_shuffle_i32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_i32x4::<0b01_00_01_00>(c, d));
        columns[value] = _mm512_shuffle_i32x4::<0b10_00_10_00>(ab, cd);
        columns[4 + value] = _mm512_shuffle_i32x4::<0b11_01_11_01>(ab, cd);
        let (ab, cd) = (_mm512_shuffle_i32x4::<0b11_10_11_10>(a, b), _mm512_shuffle_i32x4::<0b11_10_11_10>(c, d));
        columns[8 + value] = _mm512_shuffle_i32x4::<0b10_00_10_00>(ab, cd);
        columns[12 + value] = _mm512_shuffle_i32x4::<0b11_01_11_01>(ab, cd);
    }
    columns
}

/// What the unsigned weights add to every sum of an activation row: 128 times the sum of its codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn unsigned_offset(x: &[i8]) -> i32 {
    x.iter().map(|&code| i32::from(code)).sum::<i32>().wrapping_mul(128)
}

/// The sum of the sixteen lanes of each register.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_lanes([a, b, c, d]: [__m512i; 4]) -> [i32; 4] {
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    let all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
    let quarter = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
    let mut sums = [0i32; 4];
    // SAFETY: four lanes are stored into four elements.
    unsafe { _mm_storeu_si128(sums.as_mut_ptr().cast(), quarter) };
    sums
}

/// Terms of a product by columns that are staged together.
const STAGED: usize = RUNS;
/// Bytes that are staged together: as many again are prefetched, and both should stay in a core's own cache.
const STAGE_BYTES: usize = 384 << 10;

/// Terms to stage of rows of `bytes`: whole groups of four and whole rounds of the lanes.
fn staged_terms(bytes: usize) -> usize {
    (STAGE_BYTES / bytes / LANES * LANES).clamp(2 * LANES, STAGED)
}

/// Part of a weight matrix that lies term by term, copied out of it so that each run of 64 bytes lies beside that of
/// the next term. Rows are read in long runs, a few at a time, which is what memory is fast at; reading 64 bytes of
/// one row after the other is several times slower.
pub(super) struct Stage {
    /// `[block][most + 1]` lines: one more than is used, so that blocks do not share cache sets.
    lines: Aligned<u8>,
    /// Terms at most.
    most: usize,
}

impl Stage {
    /// Room for `most` rows of `bytes`.
    pub(super) fn new(bytes: usize, most: usize) -> Self {
        Self { lines: Aligned::zeros(bytes.div_ceil(64) * (most + 1) * 64), most }
    }

    /// Bytes from one block to the next.
    #[inline(always)]
    fn block_bytes(&self) -> usize {
        (self.most + 1) * 64
    }

    /// Copies `terms` rows of `bytes` each; `row(k)` is where row `k` begins.
    ///
    /// # Safety
    /// `bytes` must be readable from every `row(0..terms)` on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) unsafe fn fill(&mut self, terms: usize, bytes: usize, row: impl Fn(usize) -> *const u8) {
        let block_bytes = self.block_bytes();
        assert!(terms <= self.most && bytes.div_ceil(64) * block_bytes <= self.lines.len());
        for first in (0..terms).step_by(4) {
            for block in 0..bytes.div_ceil(64) {
                let mask = u64::MAX >> (64 - (bytes - block * 64).min(64));
                for k in first..terms.min(first + 4) {
                    // SAFETY: the mask leaves only bytes of the row; the line is inside `lines`, as asserted above.
                    unsafe {
                        let line = _mm512_maskz_loadu_epi8(mask, row(k).add(block * 64).cast());
                        let to = self.lines.as_mut_ptr().add(block * block_bytes + k * 64);
                        _mm512_storeu_si512(to.cast(), line);
                    }
                }
            }
        }
    }

    /// The lines of a block, 64 bytes a term.
    #[inline(always)]
    pub(super) fn block(&self, block: usize) -> &[u8] {
        &self.lines[block * self.block_bytes()..][..self.most * 64]
    }
}

/// The lines of rows that are staged next, to be prefetched one by one while others are computed with.
pub(super) struct Ahead {
    line: *const u8,
    /// Lines of a row, and those left of the present one.
    lines: usize,
    rest: usize,
    /// Bytes from the end of a row's part to the start of the next one's.
    gap: isize,
    left: usize,
}

impl Ahead {
    /// `terms` rows of `bytes` from `first` on, `stride` bytes apart.
    pub(super) fn new(first: *const u8, stride: isize, terms: usize, bytes: usize) -> Self {
        let lines = bytes.div_ceil(64);
        Self { line: first, lines, rest: lines, gap: stride - 64 * lines as isize, left: terms * lines }
    }

    /// Prefetches the next `count` lines.
    #[inline(always)]
    pub(super) fn go(&mut self, count: usize) {
        for _ in 0..count.min(self.left) {
            prefetch(self.line);
            self.line = self.line.wrapping_add(64);
            self.rest -= 1;
            if self.rest == 0 {
                self.line = self.line.wrapping_offset(self.gap);
                self.rest = self.lines;
            }
            self.left -= 1;
        }
    }
}

/// Four weights of each of 64 columns, column by column, as VNNI takes them: `[4]` registers of 16 columns.
type I8Panel = [[__m512i; 4]; STAGED / 4];

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i8_columns(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
    let (depth, width) = (w.rows(), w.width());
    if depth == 0 || width == 0 {
        return out.fill(0);
    }
    let rows = x.len() / depth;
    let blocks = width.div_ceil(64);
    // Activations padded to whole groups of four with zeros, which add nothing.
    let padded = depth.next_multiple_of(4);
    let codes = Aligned::rows(x, depth, 0, padded);
    let row = |k: usize| w.as_ptr().wrapping_offset(k as isize * w.stride()).cast::<u8>();
    // Lines to prefetch with each group of four terms.
    let share = 4usize.div_ceil(rows.div_ceil(4));
    let mut stage = Stage::new(width, STAGED);
    let mut panel: I8Panel = [[_mm512_setzero_si512(); 4]; STAGED / 4];
    // [block][row][4 registers of 16 columns]
    let mut acc = vec![[_mm512_setzero_si512(); 4]; blocks * rows];
    let most = staged_terms(width);
    for start in (0..depth).step_by(most) {
        let terms = most.min(depth - start);
        let next = most.min(depth - start - terms);
        // SAFETY: rows start..start + terms of the block are `width` bytes long.
        unsafe { stage.fill(terms, width, |k| row(start + k)) };
        let mut ahead = Ahead::new(row(start + terms), w.stride(), next, width);
        for (block, acc) in acc.chunks_exact_mut(rows).enumerate() {
            let groups = pack(stage.block(block), terms, &mut panel);
            let mut first = 0;
            while first < rows {
                let codes = &codes[first * padded + start..];
                let acc = &mut acc[first..];
                first += match acc.len() {
                    1 => i8_packed::<1>(codes, padded, groups, &panel, acc, &mut ahead, share),
                    2 => i8_packed::<2>(codes, padded, groups, &panel, acc, &mut ahead, share),
                    3 => i8_packed::<3>(codes, padded, groups, &panel, acc, &mut ahead, share),
                    _ => i8_packed::<4>(codes, padded, groups, &panel, acc, &mut ahead, share),
                };
            }
        }
    }
    for row in 0..rows {
        let offset = unsigned_offset(&x[row * depth..(row + 1) * depth]);
        for (block, out) in out[row * width..(row + 1) * width].chunks_mut(64).enumerate() {
            let mut sums = [0i32; 64];
            for (j, register) in acc[block * rows + row].into_iter().enumerate() {
                // SAFETY: sixteen lanes are stored into sixteen elements.
                unsafe { _mm512_storeu_si512(sums[j * 16..j * 16 + 16].as_mut_ptr().cast(), register) };
            }
            for (n, out) in out.iter_mut().enumerate() {
                // Register j holds, in each quarter, the j-th four of sixteen columns.
                let (quarter, j, lane) = (n / 16, n % 16 / 4, n % 4);
                *out = sums[j * 16 + quarter * 4 + lane].wrapping_sub(offset);
            }
        }
    }
}

/// Packs the lines of a block, made unsigned, in groups of four terms; returns how many groups. Lines past the last
/// term hold anything: their activations are zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn pack(lines: &[u8], terms: usize, panel: &mut I8Panel) -> usize {
    let flip = _mm512_set1_epi8(-128);
    let groups = terms.div_ceil(4);
    for (four, panel) in lines.chunks_exact(4 * 64).zip(panel).take(groups) {
        let mut rows = [flip; 4];
        for i in 0..4 {
            // SAFETY: four lines of 64 bytes.
            rows[i] = _mm512_xor_si512(unsafe { _mm512_loadu_si512(four.as_ptr().add(i * 64).cast()) }, flip);
        }
        let [a, b, c, d] = rows;
        let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
        panel[0] = _mm512_unpacklo_epi16(ab, cd);
        panel[1] = _mm512_unpackhi_epi16(ab, cd);
        let (ab, cd) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
        panel[2] = _mm512_unpacklo_epi16(ab, cd);
        panel[3] = _mm512_unpackhi_epi16(ab, cd);
    }
    groups
}

/// Adds a panel's products to the sums of `R` activation rows; returns `R`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i8_packed<const R: usize>(
    codes: &[i8],
    stride: usize,
    groups: usize,
    panel: &I8Panel,
    out: &mut [[__m512i; 4]],
    ahead: &mut Ahead,
    share: usize,
) -> usize {
    assert!(codes.len() >= (R - 1) * stride + groups * 4);
    let out = &mut out[..R];
    let mut acc = [[_mm512_setzero_si512(); 4]; R];
    for r in 0..R {
        acc[r] = out[r];
    }
    for (group, w) in panel[..groups].iter().enumerate() {
        ahead.go(share);
        for r in 0..R {
            // SAFETY: four codes of row r, inside the slice by the assertion above.
            let four = unsafe { codes.as_ptr().add(r * stride + group * 4).cast::<i32>().read_unaligned() };
            let x = _mm512_set1_epi32(four);
            for j in 0..4 {
                acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], w[j], x);
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

impl Source<'_> {
    /// Where term `at` lies, and the bytes of a term.
    fn address(&self, at: usize) -> (*const u8, usize) {
        match self {
            Self::Bf16(row) => (row.as_ptr().wrapping_add(at).cast(), size_of::<bf16>()),
            Self::Scaled(row, ..) => (row.as_ptr().wrapping_add(at).cast(), size_of::<i8>()),
        }
    }
}

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
fn dots<'a>(x: &[f32], depth: usize, outputs: usize, source: impl Fn(usize) -> Source<'a>, out: &mut [f32]) {
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
        if let (Source::Scaled(_, a, _), Source::Scaled(_, b, _)) = (weights[2 * pair], weights[2 * pair + 1]) {
            scales[pair] = _mm512_insertf32x8::<1>(_mm512_set1_ps(*a), _mm256_set1_ps(*b));
        }
    }
    let from: [*const u8; 2 * PAIRS] = weights.map(|row| row.address(at).0);
    let (whole, rest) = (terms / LANES, terms % LANES);
    match weights[0] {
        Source::Bf16(_) => {
            if rest > 0 {
                let value = |row: &Source<'_>, k: usize| if let Source::Bf16(row) = row { row[k] } else { bf16::ZERO };
                let last = last_terms(weights, at, terms, value);
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
            let ties = weights.iter().any(|row| matches!(row, Source::Scaled(.., true)));
            if rest > 0 {
                let code = |row: &Source<'_>, k: usize| if let Source::Scaled(row, ..) = row { row[k] } else { 0 };
                let last = last_terms(weights, at, terms, code);
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
fn last_terms<T: Copy + Default>(
    weights: &[&Source<'_>; 2 * PAIRS],
    at: usize,
    terms: usize,
    term: impl Fn(&Source<'_>, usize) -> T,
) -> [[T; LANES]; 2 * PAIRS] {
    let mut last = [[T::default(); LANES]; 2 * PAIRS];
    for (last, row) in last.iter_mut().zip(weights) {
        for (k, last) in (terms - terms % LANES..terms).zip(last) {
            *last = term(row, at + k);
        }
    }
    last
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
pub(super) fn trees(lanes: __m512) -> [f32; 2] {
    let pairs = _mm512_add_ps(lanes, _mm512_permute_ps::<0b10_11_00_01>(lanes));
    let fours = _mm512_add_ps(pairs, _mm512_permute_ps::<0b01_00_11_10>(pairs));
    let eights = _mm512_add_ps(fours, _mm512_shuffle_f32x4::<0b10_11_00_01>(fours, fours));
    [_mm512_cvtss_f32(eights), _mm_cvtss_f32(_mm512_extractf32x4_ps::<2>(eights))]
}

/// Widened weights of 32 columns.
type ColumnPanel = [[__m512; 2]; STAGED];

/// 32 columns of a lane and a row: what the lane has, and the first of two runs.
type ColumnSums = [[__m512; 2]; 2];

/// Products with weights that lie term by term: term `k` goes to lane `k % 8`. What is staged together is one run.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn columns(x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
    let (depth, width) = (w.rows(), w.width());
    if depth == 0 || width == 0 {
        return out.fill(0.0);
    }
    let rows = x.len() / depth;
    let (bytes, blocks) = (2 * width, width.div_ceil(32));
    let stride = 2 * w.stride();
    let row = |k: usize| w.as_ptr().cast::<u8>().wrapping_offset(k as isize * stride);
    let mut stage = Stage::new(bytes, STAGED);
    let mut panel: ColumnPanel = [[ZERO; 2]; STAGED];
    // [block][lane][row]
    let mut acc: Vec<ColumnSums> = vec![[[ZERO; 2]; 2]; blocks * LANES * rows];
    for at in (0..depth).step_by(STAGED) {
        let (terms, second) = (STAGED.min(depth - at), at / STAGED % 2 == 1);
        let next = STAGED.min(depth - at - terms);
        // SAFETY: rows at..at + terms of the block are `bytes` long.
        unsafe { stage.fill(terms, bytes, |k| row(at + k)) };
        let mut ahead = Ahead::new(row(at + terms), stride, next, bytes);
        for (block, acc) in acc.chunks_exact_mut(LANES * rows).enumerate() {
            for (line, panel) in stage.block(block).chunks_exact(64).zip(&mut panel).take(terms) {
                // SAFETY: a line is twice 32 bytes.
                let (low, high) = unsafe {
                    (_mm256_loadu_si256(line.as_ptr().cast()), _mm256_loadu_si256(line[32..].as_ptr().cast()))
                };
                panel[0] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(low)));
                panel[1] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(high)));
            }
            for (lane, acc) in acc.chunks_exact_mut(rows).enumerate() {
                let mut first = 0;
                while first < rows {
                    let (x, acc) = (&x[first * depth + at..], &mut acc[first..]);
                    first += match acc.len() {
                        1 => column_block::<1>(x, depth, lane, terms, &panel, acc, second, &mut ahead),
                        2 | 3 => column_block::<2>(x, depth, lane, terms, &panel, acc, second, &mut ahead),
                        4..=7 => column_block::<4>(x, depth, lane, terms, &panel, acc, second, &mut ahead),
                        _ => column_block::<8>(x, depth, lane, terms, &panel, acc, second, &mut ahead),
                    };
                }
            }
        }
    }
    for (block, acc) in acc.chunks_exact_mut(LANES * rows).enumerate() {
        let columns = block * 32..width.min(block * 32 + 32);
        if depth.div_ceil(STAGED) % 2 == 1 {
            for [sum, first] in &mut *acc {
                *sum = [_mm512_add_ps(sum[0], first[0]), _mm512_add_ps(sum[1], first[1])];
            }
        }
        let mut live = LANES;
        while live > 1 {
            live /= 2;
            for lane in 0..live {
                for row in 0..rows {
                    let ([a, _], [b, _]) = (acc[2 * lane * rows + row], acc[(2 * lane + 1) * rows + row]);
                    acc[lane * rows + row][0] = [_mm512_add_ps(a[0], b[0]), _mm512_add_ps(a[1], b[1])];
                }
            }
        }
        for (row, [sums, _]) in acc[..rows].iter().enumerate() {
            let mut values = [0f32; 32];
            // SAFETY: two registers are stored into two times sixteen elements.
            unsafe {
                _mm512_storeu_ps(values.as_mut_ptr(), sums[0]);
                _mm512_storeu_ps(values[16..].as_mut_ptr(), sums[1]);
            }
            out[row * width..][columns.clone()].copy_from_slice(&values[..columns.len()]);
        }
    }
}

/// The run of one lane for `R` activation rows, kept when it is the first and added with the first when it is the
/// second; returns `R`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn column_block<const R: usize>(
    x: &[f32],
    stride: usize,
    lane: usize,
    terms: usize,
    panel: &ColumnPanel,
    out: &mut [ColumnSums],
    second: bool,
    ahead: &mut Ahead,
) -> usize {
    assert!(x.len() >= (R - 1) * stride + terms && terms <= STAGED);
    let out = &mut out[..R];
    let mut acc = [[ZERO; 2]; R];
    for k in (lane..terms).step_by(LANES) {
        ahead.go(1);
        let w = panel[k];
        for r in 0..R {
            // SAFETY: the activation of row r and term k, inside the slice by the assertion above.
            let x = _mm512_set1_ps(unsafe { *x.as_ptr().add(r * stride + k) });
            acc[r] = [_mm512_fmadd_ps(x, w[0], acc[r][0]), _mm512_fmadd_ps(x, w[1], acc[r][1])];
        }
    }
    for r in 0..R {
        if second {
            let [sum, first] = out[r];
            let both = |half: usize| _mm512_add_ps(first[half], acc[r][half]);
            out[r][0] = [_mm512_add_ps(sum[0], both(0)), _mm512_add_ps(sum[1], both(1))];
        } else {
            out[r][1] = acc[r];
        }
    }
    R
}

/// [`Kernels::scores`] for keys of whole lanes: four keys are widened on the way, two a register, and meet up to five
/// queries each.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn scores(q: &[f32], keys: &[&[bf16]], upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
    let (dim, tokens) = (keys[0].len(), keys.len());
    for (group, (q, out)) in q.chunks(5 * dim).zip(out.chunks_mut(5 * tokens)).enumerate() {
        for (four, token) in keys.chunks(4).zip((0..tokens).step_by(4)) {
            if group == 0 {
                upcoming.fetch(3);
            }
            // Missing keys are the last once more, and not stored.
            let four = four.first_chunk().copied().unwrap_or_else(|| from_fn(|j| four[j.min(four.len() - 1)]));
            up_to_five!(q.len() / dim, score_block(q, four, token, tokens, out))
        }
    }
}

/// The scores of `R` queries and four keys.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn score_block<const R: usize>(q: &[f32], keys: [&[bf16]; 4], token: usize, tokens: usize, out: &mut [f32]) {
    let dim = keys[0].len();
    assert!(q.len() >= R * dim && keys.iter().all(|key| key.len() == dim) && dim.is_multiple_of(LANES));
    let mut acc = [[ZERO; 2]; R];
    for d in (0..dim).step_by(LANES) {
        let mut k = [ZERO; 2];
        for pair in 0..2 {
            // SAFETY: eight values of each key, as d + 8 <= dim.
            let (a, b) = unsafe {
                let (a, b) = (keys[2 * pair].as_ptr().add(d), keys[2 * pair + 1].as_ptr().add(d));
                (_mm_loadu_si128(a.cast()), _mm_loadu_si128(b.cast()))
            };
            let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b);
            k[pair] = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(both)));
        }
        for r in 0..R {
            // SAFETY: eight values of query r, inside by the assertion above.
            let q = _mm512_broadcast_f32x8(unsafe { _mm256_loadu_ps(q.as_ptr().add(r * dim + d)) });
            acc[r] = [_mm512_fmadd_ps(q, k[0], acc[r][0]), _mm512_fmadd_ps(q, k[1], acc[r][1])];
        }
    }
    for r in (0..R).step_by(2) {
        // Two queries at a time, or the last one twice. A run of -0 makes a lane +0.
        let sums = _mm512_add_ps(key_trees(acc[r], acc[(r + 1).min(R - 1)]), ZERO);
        let sums = [_mm512_castps512_ps128(sums), _mm512_extractf32x4_ps::<1>(sums)];
        for (out, sums) in out[r * tokens..].chunks_mut(tokens).take((R - r).min(2)).zip(sums) {
            let mask = 0b1111 >> (4 - (tokens - token).min(4));
            // SAFETY: the mask leaves the scores of keys.
            unsafe { _mm_mask_storeu_ps(out[token..].as_mut_ptr(), mask, sums) };
        }
    }
}

/// The lanes of the scores of two queries and four keys, two keys a register, added in adjacent pairs: four sums of the
/// one query, then four of the other.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn key_trees(one: [__m512; 2], other: [__m512; 2]) -> __m512 {
    // Pairs of neighbours of two registers, in quarters: first those of the one, then those of the other.
    let pairs = |[a, b]: [__m512; 2]| {
        _mm512_add_ps(_mm512_shuffle_ps::<0b10_00_10_00>(a, b), _mm512_shuffle_ps::<0b11_01_11_01>(a, b))
    };
    let fours = pairs([pairs(one), pairs(other)]);
    let eights = _mm512_add_ps(fours, _mm512_shuffle_f32x4::<0b10_11_00_01>(fours, fours));
    // The first quarter has keys 0 and 2 of either query, the third keys 1 and 3.
    _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0), eights)
}

/// Columns of values that meet a row of weights together.
const COLUMNS: usize = 64;

/// [`Kernels::weighted`] for values of whole blocks of [`COLUMNS`]: up to five rows of weights at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn weighted(values: Weighted<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
    values.by_rows(5, upcoming, out, |rows, upcoming, out| {
        up_to_five!(rows.factors.len(), weighted_rows(rows, upcoming, out))
    });
}

/// `R` rows of weights and all columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn weighted_rows<const R: usize>(tile: ValueTile<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
    let ValueTile { p, stride, factors, values } = tile;
    let dim = values[0].len();
    assert!(p.len() >= (R - 1) * stride + values.len() && out.len() >= R * dim);
    assert!(values.iter().all(|value| value.len() == dim) && dim.is_multiple_of(COLUMNS));
    for d in (0..dim).step_by(COLUMNS) {
        upcoming.fetch(3 * values.len() / 4 * COLUMNS / dim);
        let mut acc = [[ZERO; COLUMNS / 16]; R];
        for (t, value) in values.iter().enumerate() {
            let v: [__m512; COLUMNS / 16] = from_fn(|part| {
                // SAFETY: sixteen of the values from d on, inside by the assertion above.
                let sixteen = unsafe { _mm256_loadu_si256(value.as_ptr().add(d + 16 * part).cast()) };
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(sixteen)))
            });
            for r in 0..R {
                // SAFETY: the weight of row r and token t, inside by the assertion above.
                let p = _mm512_set1_ps(unsafe { *p.as_ptr().add(r * stride + t) });
                acc[r] = from_fn(|part| _mm512_fmadd_ps(p, v[part], acc[r][part]));
            }
        }
        for r in 0..R {
            let [a, c] = factors[r].map(|factor| _mm512_set1_ps(factor));
            for (part, sums) in acc[r].into_iter().enumerate() {
                // SAFETY: sixteen columns of row r, inside by the assertion above.
                unsafe {
                    let out = out.as_mut_ptr().add(r * dim + d + 16 * part);
                    _mm512_storeu_ps(
                        out,
                        _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(out), a), _mm512_mul_ps(sums, c)),
                    );
                }
            }
        }
    }
}

/// Independent accumulators that hide the latency of a multiply-add.
const CHAINS: usize = 16;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i8_burst(steps: u64) -> u64 {
    let mut acc: [__m512i; CHAINS] = from_fn(|i| _mm512_set1_epi32(i as i32));
    let (x, w) = std::hint::black_box((_mm512_set1_epi8(3), _mm512_set1_epi8(5)));
    for _ in 0..steps {
        for acc in &mut acc {
            *acc = _mm512_dpbusd_epi32(*acc, w, x);
        }
    }
    std::hint::black_box(acc);
    steps * (CHAINS * 64) as u64
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn f32_burst(steps: u64) -> u64 {
    let mut acc: [__m512; CHAINS] = from_fn(|i| _mm512_set1_ps(i as f32));
    let (x, w) = std::hint::black_box((_mm512_set1_ps(0.5), _mm512_set1_ps(1.0)));
    for _ in 0..steps {
        for acc in &mut acc {
            *acc = _mm512_fmadd_ps(*acc, x, w);
        }
    }
    std::hint::black_box(acc);
    steps * (CHAINS * 16) as u64
}
