//! The AVX-512 level. INT8 products use VNNI: weights become unsigned by flipping their sign bit (`w + 128`), and 128
//! times the sum of the activations is taken off at the end. FP32 sums keep the eight canonical lanes: a register holds
//! the lanes of two outputs side by side, or one lane of sixteen columns. Weights are widened into a small panel that
//! all activation rows share, and what comes next is prefetched meanwhile.

use std::arch::x86_64::*;
use std::array::from_fn;

use half::bf16;

use super::level::{Block, Kernels};
use super::plain::Plain;
use super::sum::LANES;

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
            && is_x86_feature_detected!("avx512vnni");
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
        unsafe { columns::<LANES>(x, w.rows(), w.width(), |k| w.row(k), out) }
    }

    fn scaled_outputs(&self, x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) {
        if scale.iter().any(|scale| !scale.is_finite()) {
            // The rounding below does not know NaN.
            return Plain.scaled_outputs(x, w, scale, out);
        }
        // SAFETY: as above.
        unsafe { dots(x, w.width(), w.rows(), |n| Source::Scaled(w.row(n), scale[n]), out) }
    }

    fn scores(&self, q: &[f32], keys: &[&[bf16]], out: &mut [f32]) {
        let dim = keys.first().map_or(0, |key| key.len());
        // SAFETY: as above.
        unsafe { dots(q, dim, keys.len(), |t| Source::Bf16(keys[t]), out) }
    }

    fn weighted(&self, p: &[f32], values: &[&[bf16]], out: &mut [f32]) {
        let dim = values.first().map_or(0, |value| value.len());
        // SAFETY: as above.
        unsafe { columns::<1>(p, values.len(), dim, |t| values[t], out) }
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

/// Outputs that a block of an INT8 product computes together.
const I8_OUTPUTS: usize = 4;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i8_outputs(x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
    let (depth, outputs) = (w.width(), w.rows());
    if depth == 0 || outputs == 0 {
        return out.fill(0);
    }
    let offsets: Vec<i32> = x.chunks_exact(depth).map(|row| offset(row)).collect();
    let passes = offsets.len().div_ceil(4);
    for start in (0..outputs).step_by(I8_OUTPUTS) {
        // Outputs past the last repeat it and are not stored.
        let row = |n: usize| w.row(n.min(outputs - 1));
        let block: [&[i8]; I8_OUTPUTS] = from_fn(|j| row(start + j));
        let next: [&[i8]; I8_OUTPUTS] = from_fn(|j| row(start + I8_OUTPUTS + j));
        let count = I8_OUTPUTS.min(outputs - start);
        let mut first = 0;
        for pass in 0..passes {
            // Every pass prefetches its share of the next block.
            let ahead = (pass, passes, &next);
            let rows = (offsets.len() - first).min(4);
            let sums = match rows {
                1 => i8_block::<1>(&x[first * depth..], depth, &block, ahead),
                2 => i8_block::<2>(&x[first * depth..], depth, &block, ahead),
                3 => i8_block::<3>(&x[first * depth..], depth, &block, ahead),
                _ => i8_block::<4>(&x[first * depth..], depth, &block, ahead),
            };
            for r in 0..rows {
                let offset = offsets[first + r];
                let at = (first + r) * outputs + start;
                for (out, sum) in out[at..at + count].iter_mut().zip(sums[r]) {
                    *out = sum.wrapping_sub(offset);
                }
            }
            first += rows;
        }
    }
}

/// What the unsigned weights add to every sum of an activation row: 128 times the sum of its codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn offset(x: &[i8]) -> i32 {
    x.iter().map(|&code| i32::from(code)).sum::<i32>().wrapping_mul(128)
}

/// The sums of four outputs over `R` activation rows, weights taken as unsigned.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i8_block<const R: usize>(
    x: &[i8],
    depth: usize,
    w: &[&[i8]; I8_OUTPUTS],
    (pass, passes, next): (usize, usize, &[&[i8]; I8_OUTPUTS]),
) -> [[i32; I8_OUTPUTS]; 4] {
    assert!(x.len() >= R * depth && w.iter().chain(next).all(|row| row.len() == depth));
    let flip = _mm512_set1_epi8(-128);
    let mut acc = [[_mm512_setzero_si512(); R]; I8_OUTPUTS];
    let (x, w, next) = (x.as_ptr(), w.map(<[i8]>::as_ptr), next.map(<[i8]>::as_ptr));
    let whole = depth - depth % 64;
    for k in (0..whole).step_by(64) {
        let mut j = pass;
        while j < I8_OUTPUTS {
            prefetch(next[j].wrapping_add(k));
            j += passes;
        }
        // SAFETY: k + 64 <= depth, the length of every row of x and w.
        let x: [__m512i; R] = from_fn(|r| unsafe { _mm512_loadu_si512(x.add(r * depth + k).cast()) });
        for j in 0..I8_OUTPUTS {
            // SAFETY: as above.
            let w = _mm512_xor_si512(unsafe { _mm512_loadu_si512(w[j].add(k).cast()) }, flip);
            for r in 0..R {
                acc[j][r] = _mm512_dpbusd_epi32(acc[j][r], w, x[r]);
            }
        }
    }
    if whole < depth {
        let mask = (1u64 << (depth - whole)) - 1;
        // SAFETY: the mask leaves only elements inside the rows; the others read as zero and add zero.
        let x: [__m512i; R] = from_fn(|r| unsafe { _mm512_maskz_loadu_epi8(mask, x.add(r * depth + whole)) });
        for j in 0..I8_OUTPUTS {
            // SAFETY: as above.
            let w = _mm512_xor_si512(unsafe { _mm512_maskz_loadu_epi8(mask, w[j].add(whole)) }, flip);
            for r in 0..R {
                acc[j][r] = _mm512_dpbusd_epi32(acc[j][r], w, x[r]);
            }
        }
    }
    from_fn(|r| if r < R { add_lanes(from_fn(|j| acc[j][r])) } else { [0; I8_OUTPUTS] })
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

/// Terms of an INT8 product by columns that are packed together.
const I8_TERMS: usize = 64;

/// Four weights of each of 64 columns, column by column, as VNNI takes them: `[4]` registers of 16 columns.
type I8Panel = [[__m512i; 4]; I8_TERMS / 4];

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
    let mut codes = vec![0i8; rows * padded];
    for (codes, x) in codes.chunks_exact_mut(padded).zip(x.chunks_exact(depth)) {
        codes[..depth].copy_from_slice(x);
    }
    // [block][row][4 registers of 16 columns]
    let mut acc = vec![[_mm512_setzero_si512(); 4]; blocks * rows];
    let mut panel: I8Panel = [[_mm512_setzero_si512(); 4]; I8_TERMS / 4];
    for start in (0..depth).step_by(I8_TERMS) {
        let terms = I8_TERMS.min(depth - start);
        for (block, acc) in acc.chunks_exact_mut(rows).enumerate() {
            let columns = block * 64..width.min(block * 64 + 64);
            pack(w, start, terms, columns.start, columns.len(), &mut panel);
            let groups = terms.div_ceil(4);
            let mut first = 0;
            while first < rows {
                let codes = &codes[first * padded + start..];
                let acc = &mut acc[first..];
                first += match acc.len() {
                    1 => i8_packed::<1>(codes, padded, groups, &panel, acc),
                    2 => i8_packed::<2>(codes, padded, groups, &panel, acc),
                    3 => i8_packed::<3>(codes, padded, groups, &panel, acc),
                    _ => i8_packed::<4>(codes, padded, groups, &panel, acc),
                };
            }
        }
    }
    for row in 0..rows {
        let offset = offset(&x[row * depth..(row + 1) * depth]);
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

/// Packs up to 64 columns of up to 64 rows of weights, made unsigned, and prefetches the rows that come next.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn pack(w: Block<'_, i8>, start: usize, terms: usize, column: usize, columns: usize, panel: &mut I8Panel) {
    let mask = if columns == 64 { u64::MAX } else { (1u64 << columns) - 1 };
    let flip = _mm512_set1_epi8(-128);
    let depth = w.rows();
    for (group, panel) in panel[..terms.div_ceil(4)].iter_mut().enumerate() {
        let [a, b, c, d] = from_fn(|i| {
            let k = start + group * 4 + i;
            let row = w.row((k + I8_TERMS).min(depth - 1))[column..].as_ptr();
            prefetch(row);
            // Rows past the last repeat it: their activations are zero.
            let row = &w.row(k.min(depth - 1))[column..column + columns];
            // SAFETY: the mask leaves only elements inside the row.
            _mm512_xor_si512(unsafe { _mm512_maskz_loadu_epi8(mask, row.as_ptr()) }, flip)
        });
        let (ab, cd) = (_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d));
        panel[0] = _mm512_unpacklo_epi16(ab, cd);
        panel[1] = _mm512_unpackhi_epi16(ab, cd);
        let (ab, cd) = (_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d));
        panel[2] = _mm512_unpacklo_epi16(ab, cd);
        panel[3] = _mm512_unpackhi_epi16(ab, cd);
    }
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
) -> usize {
    assert!(codes.len() >= (R - 1) * stride + groups * 4);
    let mut acc: [[__m512i; 4]; R] = from_fn(|r| out[r]);
    for (group, w) in panel[..groups].iter().enumerate() {
        for r in 0..R {
            // SAFETY: four codes of row r, inside the slice by the assertion above.
            let four = unsafe { codes.as_ptr().add(r * stride + group * 4).cast::<i32>().read_unaligned() };
            let x = _mm512_set1_epi32(four);
            for j in 0..4 {
                acc[r][j] = _mm512_dpbusd_epi32(acc[r][j], w[j], x);
            }
        }
    }
    out[..R].copy_from_slice(&acc);
    R
}

/// A row of weights before it is widened.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// BF16.
    Bf16(&'a [bf16]),
    /// INT8 codes and their finite scale.
    Scaled(&'a [i8], f32),
}

/// Pairs of outputs that a block computes together.
const PAIRS: usize = 3;
/// Terms that are widened together.
const TERMS: usize = 256;

/// Widened weights: for each eight terms, the lanes of two outputs side by side, for each pair.
type Panel = [[__m512; PAIRS]; TERMS / LANES];

/// Products with weights that lie output by output.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dots<'a>(x: &[f32], depth: usize, outputs: usize, source: impl Fn(usize) -> Source<'a>, out: &mut [f32]) {
    if depth == 0 || outputs == 0 {
        return out.fill(0.0);
    }
    let rows = x.len() / depth;
    let mut panel: Panel = [[_mm512_setzero_ps(); PAIRS]; TERMS / LANES];
    let mut acc = vec![[_mm512_setzero_ps(); PAIRS]; rows];
    for start in (0..outputs).step_by(2 * PAIRS) {
        acc.fill([_mm512_setzero_ps(); PAIRS]);
        // Outputs past the last repeat it and are not stored.
        let weights: [Source<'a>; 2 * PAIRS] = from_fn(|j| source((start + j).min(outputs - 1)));
        let pairs = (outputs - start).div_ceil(2).min(PAIRS);
        for at in (0..depth).step_by(TERMS) {
            let terms = TERMS.min(depth - at);
            for pair in 0..pairs {
                widen(weights[2 * pair], weights[2 * pair + 1], at, terms, &mut panel, pair);
            }
            let mut first = 0;
            while first < rows {
                let (x, acc) = (&x[first * depth + at..], &mut acc[first..]);
                first += match acc.len() {
                    1 => dot_block::<1>(x, depth, terms, &panel, acc),
                    2 | 3 => dot_block::<2>(x, depth, terms, &panel, acc),
                    4..=7 => dot_block::<4>(x, depth, terms, &panel, acc),
                    _ => dot_block::<8>(x, depth, terms, &panel, acc),
                };
            }
        }
        for (acc, out) in acc.iter().zip(out.chunks_exact_mut(outputs)) {
            for (pair, out) in out[start..].chunks_mut(2).take(pairs).enumerate() {
                for (out, sum) in out.iter_mut().zip(trees(acc[pair])) {
                    *out = sum;
                }
            }
        }
    }
}

/// Widens `terms` weights of two outputs from term `at` on, and prefetches what comes next of them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn widen(a: Source<'_>, b: Source<'_>, at: usize, terms: usize, panel: &mut Panel, pair: usize) {
    let whole = terms - terms % LANES;
    // The last terms are read into a padded copy; the padding is never added.
    match (a, b) {
        (Source::Bf16(a), Source::Bf16(b)) => {
            prefetch_terms(a, at + terms);
            prefetch_terms(b, at + terms);
            let (a, b) = (&a[at..at + terms], &b[at..at + terms]);
            for k in (0..whole).step_by(LANES) {
                panel[k / LANES][pair] = widen_bf16(&a[k..k + LANES], &b[k..k + LANES]);
            }
            if whole < terms {
                let (mut last_a, mut last_b) = ([bf16::ZERO; LANES], [bf16::ZERO; LANES]);
                last_a[..terms - whole].copy_from_slice(&a[whole..]);
                last_b[..terms - whole].copy_from_slice(&b[whole..]);
                panel[whole / LANES][pair] = widen_bf16(&last_a, &last_b);
            }
        }
        (Source::Scaled(a, scale_a), Source::Scaled(b, scale_b)) => {
            prefetch_terms(a, at + terms);
            prefetch_terms(b, at + terms);
            let (a, b) = (&a[at..at + terms], &b[at..at + terms]);
            let scale = _mm512_insertf32x8::<1>(_mm512_set1_ps(scale_a), _mm256_set1_ps(scale_b));
            for k in (0..whole).step_by(LANES) {
                panel[k / LANES][pair] = widen_scaled(&a[k..k + LANES], &b[k..k + LANES], scale);
            }
            if whole < terms {
                let (mut last_a, mut last_b) = ([0; LANES], [0; LANES]);
                last_a[..terms - whole].copy_from_slice(&a[whole..]);
                last_b[..terms - whole].copy_from_slice(&b[whole..]);
                panel[whole / LANES][pair] = widen_scaled(&last_a, &last_b, scale);
            }
        }
        // All rows of a product come from one source.
        _ => {}
    }
}

/// Prefetches what a later call of [`widen`] reads. An address past the row is often where the next row begins.
#[inline(always)]
fn prefetch_terms<T>(row: &[T], at: usize) {
    for line in (0..TERMS * size_of::<T>()).step_by(64) {
        prefetch(row.as_ptr().wrapping_add(at).wrapping_byte_add(line));
    }
}

/// Asks for a cache line.
#[inline(always)]
fn prefetch<T>(address: *const T) {
    // Not an unsafe function in every release of the standard library.
    #[allow(unused_unsafe)]
    // SAFETY: prefetching reads nothing and never faults, whatever the address.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn widen_bf16(a: &[bf16], b: &[bf16]) -> __m512 {
    assert!(a.len() == LANES && b.len() == LANES);
    // SAFETY: eight BF16 values are 128 bits each.
    let (a, b) = unsafe { (_mm_loadu_si128(a.as_ptr().cast()), _mm_loadu_si128(b.as_ptr().cast())) };
    let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b);
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(both)))
}

/// `BF16_RNE(f32(code) * scale)`, widened.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn widen_scaled(a: &[i8], b: &[i8], scale: __m512) -> __m512 {
    assert!(a.len() == LANES && b.len() == LANES);
    // SAFETY: eight codes are 64 bits each.
    let (a, b) = unsafe { (_mm_loadl_epi64(a.as_ptr().cast()), _mm_loadl_epi64(b.as_ptr().cast())) };
    let codes = _mm512_cvtepi8_epi32(_mm_unpacklo_epi64(a, b));
    let bits = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(codes), scale));
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(0xFFFF_0000_u32 as i32)))
}

/// Adds a panel's products to the lanes of `R` activation rows; returns `R`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_block<const R: usize>(
    x: &[f32],
    stride: usize,
    terms: usize,
    panel: &Panel,
    out: &mut [[__m512; PAIRS]],
) -> usize {
    assert!(x.len() >= (R - 1) * stride + terms);
    let mut acc: [[__m512; PAIRS]; R] = from_fn(|r| out[r]);
    let whole = terms / LANES;
    for (step, w) in panel[..whole].iter().enumerate() {
        for r in 0..R {
            // SAFETY: eight activations of row r, inside the slice by the assertion above.
            let x = _mm512_broadcast_f32x8(unsafe { _mm256_loadu_ps(x.as_ptr().add(r * stride + step * LANES)) });
            for pair in 0..PAIRS {
                acc[r][pair] = _mm512_fmadd_ps(x, w[pair], acc[r][pair]);
            }
        }
    }
    if terms % LANES != 0 {
        let mask = (1u16 << (terms % LANES)) - 1;
        for r in 0..R {
            let at = r * stride + whole * LANES;
            // SAFETY: the mask leaves only activations inside the slice.
            let x = _mm512_broadcast_f32x8(unsafe { _mm256_maskz_loadu_ps(mask as u8, x.as_ptr().add(at)) });
            for pair in 0..PAIRS {
                // Lanes without a term keep their value: adding zero could turn -0 into +0.
                acc[r][pair] = _mm512_mask3_fmadd_ps(x, panel[whole][pair], acc[r][pair], mask | mask << LANES);
            }
        }
    }
    out[..R].copy_from_slice(&acc);
    R
}

/// The tree of adjacent pairs over the eight lanes of each half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn trees(lanes: __m512) -> [f32; 2] {
    let pairs = _mm512_add_ps(lanes, _mm512_permute_ps::<0b10_11_00_01>(lanes));
    let fours = _mm512_add_ps(pairs, _mm512_permute_ps::<0b01_00_11_10>(pairs));
    let eights = _mm512_add_ps(fours, _mm512_shuffle_f32x4::<0b10_11_00_01>(fours, fours));
    [_mm512_cvtss_f32(eights), _mm_cvtss_f32(_mm512_extractf32x4_ps::<2>(eights))]
}

/// Terms whose weights are widened together, of a product by columns.
const COLUMN_TERMS: usize = 128;

/// Widened weights of 32 columns.
type ColumnPanel = [[__m512; 2]; COLUMN_TERMS];

/// Products with weights that lie term by term, summed over `L` lanes: term `k` goes to lane `k % L`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn columns<'a, const L: usize>(
    x: &[f32],
    depth: usize,
    width: usize,
    weights: impl Fn(usize) -> &'a [bf16],
    out: &mut [f32],
) {
    if depth == 0 || width == 0 {
        return out.fill(0.0);
    }
    let rows = x.len() / depth;
    let blocks = width.div_ceil(32);
    let mut panel: ColumnPanel = [[_mm512_setzero_ps(); 2]; COLUMN_TERMS];
    // [block][lane][row][2 registers of 16 columns]
    let mut acc = vec![[_mm512_setzero_ps(); 2]; blocks * L * rows];
    for at in (0..depth).step_by(COLUMN_TERMS) {
        let terms = COLUMN_TERMS.min(depth - at);
        for (block, acc) in acc.chunks_exact_mut(L * rows).enumerate() {
            let columns = block * 32..width.min(block * 32 + 32);
            let mask = if columns.len() == 32 { u32::MAX } else { (1u32 << columns.len()) - 1 };
            for (k, panel) in panel[..terms].iter_mut().enumerate() {
                let ahead = weights((at + k + COLUMN_TERMS).min(depth - 1))[columns.start..].as_ptr();
                prefetch(ahead);
                let row = &weights(at + k)[columns.clone()];
                // SAFETY: the mask leaves only weights inside the row.
                let row = unsafe { _mm512_maskz_loadu_epi16(mask, row.as_ptr().cast()) };
                let halves = [_mm512_castsi512_si256(row), _mm512_extracti64x4_epi64::<1>(row)];
                *panel = halves.map(|half| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half))));
            }
            for (lane, acc) in acc.chunks_exact_mut(rows).enumerate() {
                let mut first = 0;
                while first < rows {
                    let (x, acc) = (&x[first * depth + at..], &mut acc[first..]);
                    first += match acc.len() {
                        1 => column_block::<1, L>(x, depth, lane, terms, &panel, acc),
                        2 | 3 => column_block::<2, L>(x, depth, lane, terms, &panel, acc),
                        4..=7 => column_block::<4, L>(x, depth, lane, terms, &panel, acc),
                        _ => column_block::<8, L>(x, depth, lane, terms, &panel, acc),
                    };
                }
            }
        }
    }
    for (block, acc) in acc.chunks_exact_mut(L * rows).enumerate() {
        let columns = block * 32..width.min(block * 32 + 32);
        let mut live = L;
        while live > 1 {
            live /= 2;
            for lane in 0..live {
                for row in 0..rows {
                    let (a, b) = (acc[2 * lane * rows + row], acc[(2 * lane + 1) * rows + row]);
                    acc[lane * rows + row] = [_mm512_add_ps(a[0], b[0]), _mm512_add_ps(a[1], b[1])];
                }
            }
        }
        for (row, sums) in acc[..rows].iter().enumerate() {
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

/// Adds the products of one lane's terms to the sums of `R` activation rows; returns `R`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn column_block<const R: usize, const L: usize>(
    x: &[f32],
    stride: usize,
    lane: usize,
    terms: usize,
    panel: &ColumnPanel,
    out: &mut [[__m512; 2]],
) -> usize {
    assert!(x.len() >= (R - 1) * stride + terms && terms <= COLUMN_TERMS);
    let mut acc: [[__m512; 2]; R] = from_fn(|r| out[r]);
    for k in (lane..terms).step_by(L) {
        let w = panel[k];
        for r in 0..R {
            // SAFETY: the activation of row r and term k, inside the slice by the assertion above.
            let x = _mm512_set1_ps(unsafe { *x.as_ptr().add(r * stride + k) });
            acc[r] = [_mm512_fmadd_ps(x, w[0], acc[r][0]), _mm512_fmadd_ps(x, w[1], acc[r][1])];
        }
    }
    out[..R].copy_from_slice(&acc);
    R
}

/// Independent accumulators that hide the latency of a multiply-add.
const CHAINS: usize = 16;

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn i8_burst(steps: u64) -> u64 {
    let mut acc: [__m512i; CHAINS] = from_fn(|i| _mm512_set1_epi32(i as i32));
    let (x, w) = std::hint::black_box((_mm512_set1_epi8(3), _mm512_set1_epi8(5)));
    for _ in 0..steps {
        // A loop: `map` would be a call to code compiled without these instructions.
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
