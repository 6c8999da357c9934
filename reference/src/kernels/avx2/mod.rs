//! The AVX2 level, with FMA: FP32 sums hold the eight canonical lanes of an output in one register, or one lane of eight
//! columns. Weights are widened into a small panel that all activation rows share.

// Blocks of registers are copied one by one: as slices they would be copied through memory.
#![allow(clippy::manual_memcpy)]

mod attention;
mod columns;
mod dots;
mod int8;
mod staged;

use std::arch::x86_64::*;
use std::array::from_fn;

use half::bf16;

use super::level::{Block, Kernels, Weighted};
use super::plain::Plain;
use super::source::{Source, splits};
use super::sum::LANES;
use super::upcoming::Upcoming;

pub(super) use self::attention::{scores, up_to_five, weighted};

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
        unsafe { int8::i8_outputs(x, w, out) }
    }

    fn i8_columns(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
        // SAFETY: as above.
        unsafe { int8::i8_columns(x, w, out) }
    }

    fn bf16_outputs(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { dots::dots(x, w.width(), w.rows(), |n| Source::Bf16(w.row(n)), out) }
    }

    fn bf16_columns(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        // SAFETY: as above.
        unsafe { columns::columns(x, w, out) }
    }

    fn scaled_outputs(&self, x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) {
        if !splits(scale) {
            return Plain.scaled_outputs(x, w, scale, out);
        }
        // SAFETY: as above.
        unsafe { dots::dots(x, w.width(), w.rows(), |n| Source::scaled(w.row(n), scale[n]), out) }
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

/// The tree of adjacent pairs over eight lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn tree(lanes: __m256) -> f32 {
    let pairs = _mm256_add_ps(lanes, _mm256_permute_ps::<0b10_11_00_01>(lanes));
    let fours = _mm256_add_ps(pairs, _mm256_permute_ps::<0b01_00_11_10>(pairs));
    _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(fours), _mm256_extractf128_ps::<1>(fours)))
}

/// Eight BF16 values, widened.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn widen_eight(eight: &[bf16; LANES]) -> __m256 {
    // SAFETY: eight values are 128 bits.
    let eight = unsafe { _mm_loadu_si128(eight.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(eight)))
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
