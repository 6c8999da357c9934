//! INT8 products with VNNI: weights become unsigned by flipping their sign bit (`w + 128`), and 128 times the sum of the
//! activations is taken off at the end.

use std::arch::x86_64::*;

use super::staged::{Ahead, STAGED, Stage, staged_terms};
use crate::kernels::aligned::Aligned;
use crate::kernels::avx2::prefetch;
use crate::kernels::level::Block;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn i8_outputs(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
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

/// Four weights of each of 64 columns, column by column, as VNNI takes them: `[4]` registers of 16 columns.
type I8Panel = [[__m512i; 4]; STAGED / 4];

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn i8_columns(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
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
