//! The AVX-512 level with byte permutations over registers (VBMI): the down projection from INT8 and scale. An
//! output's weights have 129 magnitudes, so that their BF16 values are made once, as tables of low and of high bytes,
//! and 64 codes are looked up at a time. Widened weights go into a small panel, the lanes of two outputs side by side; a
//! register of sums holds the eight canonical lanes of both, so that activations are broadcast to them by the load
//! alone. All other operations are those of [`Avx512`].

use std::arch::asm;
use std::arch::x86_64::*;
use std::array::from_fn;

use half::bf16;

use super::aligned::Aligned;
use super::avx2::prefetch;
use super::avx512::{Avx512, ZERO, trees};
use super::level::{Block, Kernels, inherited};
use super::packed::Packed;
use super::sum::{LANES, RUN, RUNS};

/// AVX-512 with VNNI and VBMI.
#[derive(Clone, Copy, Debug)]
pub struct Vbmi(Avx512);

impl Vbmi {
    /// The level, where the CPU has it.
    #[must_use]
    pub fn new() -> Option<Self> {
        let avx512 = Avx512::new()?;
        is_x86_feature_detected!("avx512vbmi").then_some(Self(avx512))
    }
}

impl Kernels for Vbmi {
    fn name(&self) -> &'static str {
        "avx512-vbmi"
    }

    fn needs(&self) -> &'static str {
        "AVX-512 F, BW, DQ, VL, VNNI and VBMI"
    }

    fn scaled_outputs(&self, x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) {
        // The weight of code 0 is taken for +0, which it is not where a scale is negative, infinite or NaN.
        if !scale.iter().all(|&scale| scale.is_sign_positive() && scale.is_finite()) {
            return self.0.scaled_outputs(x, w, scale, out);
        }
        // SAFETY: a value of this type exists only where the CPU has these instructions.
        unsafe { scaled_outputs(x, w, scale, out) }
    }

    inherited!(i8_outputs i8_columns bf16_outputs bf16_columns scores weighted i8_burst f32_burst);
}

/// Codes that are looked up together.
pub(super) const CODES: usize = 64;
/// Pairs of outputs whose sums are in registers together.
const PAIRS: usize = 6;
/// Outputs whose weights are widened together.
const OUTPUTS: usize = 2 * PAIRS;
/// Activation rows whose sums are in registers together.
const ROWS: usize = 4;
/// Terms that are widened together: two runs of every lane.
const TERMS: usize = 2 * RUNS;
/// Values of a step: eight terms of a pair of outputs.
const STEP: usize = 2 * LANES;

/// The BF16 weights of an output's positive codes, low bytes and high bytes. At 0 stands that of 128, whose low seven
/// bits are zero; code 0 itself is not looked up.
pub(super) type Table = [[__m512i; 2]; 2];

/// The values of the codes of a [`Table`].
const VALUES: [f32; 128] = {
    let mut values = [128f32; 128];
    let mut code = 1;
    while code < 128 {
        values[code] = code as f32;
        code += 1;
    }
    values
};

/// Every second element of two registers, from `first` on.
const fn every_second<const N: usize>(first: usize) -> [u8; N] {
    let mut places = [0; N];
    let mut at = 0;
    while at < N {
        places[at] = (2 * at + first) as u8;
        at += 1;
    }
    places
}

/// The table of an output, of a scale that is finite and not negative.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn table(scale: f32) -> Table {
    let (scale, half) = (_mm512_set1_ps(scale), _mm512_set1_epi32(0x7fff));
    let mut rounded = [half; 8];
    for (rounded, values) in rounded.iter_mut().zip(VALUES.as_chunks::<16>().0) {
        // SAFETY: sixteen values.
        let bits = _mm512_castps_si512(_mm512_mul_ps(unsafe { _mm512_loadu_ps(values.as_ptr()) }, scale));
        // To nearest, ties to even: no NaN is among them, and what overflows becomes infinite. The upper half counts.
        let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        *rounded = _mm512_add_epi32(_mm512_add_epi32(bits, half), last);
    }
    // SAFETY: 32 bytes, and 64 each.
    let (upper, low, high) = unsafe {
        let upper = _mm256_loadu_si256(every_second::<32>(1).as_ptr().cast());
        let bytes = [0, 1].map(|first| _mm512_loadu_si512(every_second::<CODES>(first).as_ptr().cast()));
        (_mm512_cvtepu8_epi16(upper), bytes[0], bytes[1])
    };
    let words = |at: usize| _mm512_permutex2var_epi16(rounded[at], upper, rounded[at + 1]);
    let words: [__m512i; 4] = from_fn(|at| words(2 * at));
    [low, high].map(|places| from_fn(|at| _mm512_permutex2var_epi8(words[2 * at], places, words[2 * at + 1])))
}

/// Where each code has to stand so that, once bytes and words are spread to lanes of 32 bits, terms are in order.
const ORDER: [u8; CODES] = {
    let mut order = [0; CODES];
    let mut at = 0;
    while at < CODES {
        let (quarter, half, lane, odd) = (at / 16, at / 8 % 2, at / 2 % 4, at % 2);
        order[at] = (32 * half + 16 * odd + 4 * quarter + lane) as u8;
        at += 1;
    }
    order
};

/// The bytes of a table by the low seven bits of each index; zero where the mask has none.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
fn look_up(table: &[__m512i; 2], index: __m512i, some: __mmask64) -> __m512i {
    let mut bytes = index;
    // The compiler makes three instructions of `_mm512_maskz_permutex2var_epi8`: a tenth of the time of `widen`.
    // SAFETY: registers only.
    unsafe {
        asm!(
            "vpermi2b {bytes}{{{some}}}{{z}}, {first}, {last}",
            bytes = inout(zmm_reg) bytes, some = in(kreg) some,
            first = in(zmm_reg) table[0], last = in(zmm_reg) table[1],
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    bytes
}

/// The BF16 weights of `codes`: of the lower eight codes of each quarter, and of the upper ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn weights(codes: __m512i, [low, high]: &Table) -> [__m512i; 2] {
    let sign = _mm512_set1_epi8(-128);
    let (index, some) = (_mm512_abs_epi8(codes), _mm512_test_epi8_mask(codes, codes));
    let (low, high) = (look_up(low, index, some), look_up(high, index, some));
    // high | (codes & sign)
    let high = _mm512_ternarylogic_epi32::<0b1111_1000>(high, codes, sign);
    [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
}

/// The weights of `codes`, widened: sixteen terms a register.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
fn widen(codes: __m512i, order: __m512i, table: &Table) -> [__m512i; 4] {
    let odd = _mm512_set1_epi32(-65536);
    let [first, last] = weights(_mm512_permutexvar_epi8(order, codes), table);
    [
        _mm512_slli_epi32::<16>(first),
        _mm512_and_si512(first, odd),
        _mm512_slli_epi32::<16>(last),
        _mm512_and_si512(last, odd),
    ]
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
fn scaled_outputs(x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) {
    let (depth, outputs) = (w.width(), w.rows());
    if depth == 0 || outputs == 0 {
        return out.fill(0.0);
    }
    let rows = x.len() / depth;
    let packed = Packed::new(x, depth, ROWS);
    let mut panel = Aligned::<f32>::zeros(OUTPUTS * TERMS);
    // [group of rows][pair][row]
    let mut acc = vec![ZERO; PAIRS * rows];
    for start in (0..outputs).step_by(OUTPUTS) {
        acc.fill(ZERO);
        // Outputs past the last repeat it and are not stored.
        let output = |n: usize| (start + n).min(outputs - 1);
        let tables: [Table; OUTPUTS] = from_fn(|n| table(scale[output(n)]));
        for at in (0..depth).step_by(TERMS) {
            let terms = TERMS.min(depth - at);
            for (n, table) in tables.iter().enumerate() {
                let codes = &w.row(output(n))[at..at + terms];
                // What comes next: these terms of the next outputs.
                let next = codes.as_ptr().wrapping_offset(OUTPUTS as isize * w.stride());
                widen_row(codes, table, &mut panel[n / 2 * 2 * TERMS + n % 2 * LANES..], next);
            }
            for &(first, size, values) in &packed.groups {
                let x = &packed.values[values + at * size..];
                let acc = &mut acc[PAIRS * first..];
                match size {
                    1 => dot_rows::<1>(x, terms, &panel, acc),
                    2 => dot_rows::<2>(x, terms, &panel, acc),
                    _ => dot_rows::<ROWS>(x, terms, &panel, acc),
                }
            }
        }
        for &(first, size, _) in &packed.groups {
            for (n, acc) in (start..outputs).step_by(2).zip(acc[PAIRS * first..].chunks_exact(size).take(PAIRS)) {
                for (acc, out) in acc.iter().zip(out[first * outputs..].chunks_exact_mut(outputs)) {
                    for (out, sum) in out[n..].iter_mut().zip(trees(*acc)) {
                        *out = sum;
                    }
                }
            }
        }
    }
}

/// Widens up to `TERMS` weights of an output into its half of each of a pair's steps, and asks for as many codes from
/// `next` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
fn widen_row(codes: &[i8], table: &Table, panel: &mut [f32], next: *const i8) {
    // SAFETY: 64 bytes.
    let order = unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) };
    let steps = codes.len().div_ceil(CODES) * CODES / LANES;
    assert!(panel.len() >= steps * STEP - LANES);
    let (whole, rest) = codes.as_chunks::<CODES>();
    let mut panel = panel.as_mut_ptr();
    for (at, codes) in whole.iter().enumerate() {
        prefetch(next.wrapping_add(at * CODES));
        // SAFETY: 64 codes.
        store(widen(unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) }, order, table), panel);
        panel = panel.wrapping_add(CODES / LANES * STEP);
    }
    if !rest.is_empty() {
        // SAFETY: the mask leaves only codes of the row.
        let codes = unsafe { _mm512_maskz_loadu_epi8((1 << rest.len()) - 1, rest.as_ptr()) };
        store(widen(codes, order, table), panel);
    }
}

/// Stores 64 widened weights, eight a step.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
fn store(weights: [__m512i; 4], panel: *mut f32) {
    for (at, weights) in weights.into_iter().enumerate() {
        // SAFETY: eight values each.
        unsafe {
            let panel = panel.add(2 * at * STEP);
            _mm256_storeu_si256(panel.cast(), _mm512_castsi512_si256(weights));
            _mm256_storeu_si256(panel.add(STEP).cast(), _mm512_extracti64x4_epi64::<1>(weights));
        }
    }
}

/// Adds the products of all pairs of outputs of the panel, those of a first and a second run, to the lanes of `R`
/// activation rows. Terms after the last are products with zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
fn dot_rows<const R: usize>(x: &[f32], terms: usize, panel: &[f32], out: &mut [__m512]) {
    let steps = terms.div_ceil(LANES);
    assert!(x.len() >= steps * R * LANES && steps * LANES <= TERMS && panel.len() == OUTPUTS * TERMS);
    let out = &mut out[..PAIRS * R];
    let (x, panel) = (x.as_ptr(), panel.as_ptr());
    let mut first = [[ZERO; R]; PAIRS];
    for run in 0..2 {
        let mut acc = [[ZERO; R]; PAIRS];
        for step in run * RUN..steps.min((run + 1) * RUN) {
            let mut w = [ZERO; PAIRS];
            for j in 0..PAIRS {
                // SAFETY: a step of pair j, inside the panel by the assertion above.
                w[j] = unsafe { _mm512_loadu_ps(panel.add(j * 2 * TERMS + step * STEP)) };
            }
            for r in 0..R {
                // SAFETY: eight terms of row r, inside the slice by the assertion above.
                let x = _mm512_broadcast_f32x8(unsafe { _mm256_loadu_ps(x.add((step * R + r) * LANES)) });
                for j in 0..PAIRS {
                    acc[j][r] = _mm512_fmadd_ps(x, w[j], acc[j][r]);
                }
            }
        }
        for j in 0..PAIRS {
            for r in 0..R {
                if run == 0 {
                    first[j][r] = acc[j][r];
                } else {
                    out[j * R + r] = _mm512_add_ps(out[j * R + r], _mm512_add_ps(first[j][r], acc[j][r]));
                }
            }
        }
    }
}
