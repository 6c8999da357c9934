//! The AVX-512 level: VNNI for INT8 products, registers of two times eight canonical lanes, or of one lane of sixteen
//! columns, for FP32 sums. Weights are widened into a small panel that all activation rows share, and what comes next is
//! prefetched meanwhile.

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

use self::attention::COLUMNS;
use super::avx2;
use super::level::{Block, Kernels, Weighted};
use super::plain::Plain;
use super::source::{Source, splits};
use super::sum::{LANES, RUNS};
use super::upcoming::Upcoming;

pub(super) use self::dots::trees;
pub(super) use self::staged::{Ahead, Stage};

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
        if keys.first().is_none_or(|key| key.len() % LANES != 0 || key.len() > RUNS) {
            // SAFETY: a CPU with AVX-512 has AVX2 and FMA.
            return unsafe { avx2::scores(q, keys, upcoming, out) };
        }
        // SAFETY: as above.
        unsafe { attention::scores(q, keys, upcoming, out) }
    }

    fn weighted(&self, values: Weighted<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
        if !values.dim().is_multiple_of(COLUMNS) {
            // SAFETY: a CPU with AVX-512 has AVX2 and FMA.
            return unsafe { avx2::weighted(values, upcoming, out) };
        }
        // SAFETY: as above.
        unsafe { attention::weighted(values, upcoming, out) }
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
