//! BF16 products on tiles in the canonical order (`docs/numerics.md`, Order of the reference). `tdpbf16ps` adds, for each
//! output and row, the first and the second terms of sixteen pairs in two sums that begin at zero, then these two, and that
//! to the tile. That is how a lane adds two runs, when the pairs hold a term of either. Here is what all such products share:
//! the values for which tiles round as FP32 instructions do, and activations as tiles.

use std::arch::x86_64::*;

use super::super::aligned::Aligned;
use super::super::sum::{LANES, RUN, RUNS};
use super::{SIDE, transposed};

/// Terms of two runs of every lane.
pub(super) const GROUP: usize = 2 * RUNS;
/// Pairs of terms in a tile: sixteen of one lane for each of sixteen outputs, or of sixteen rows.
pub(super) const TILE: usize = SIDE * RUN;
const _: () = assert!(RUN == SIDE);
/// Lanes whose sums are in tiles together.
pub(super) const TOGETHER: usize = 4;
/// Pairs of terms in the tiles of these lanes.
pub(super) const TILES: usize = TOGETHER * TILE;

/// Biased exponents of the smallest value but zero, and of the largest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exponents {
    pub(super) least: u32,
    pub(super) most: u32,
}

impl Exponents {
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn of(values: &[f32]) -> Self {
        let (mut least, mut most) = (u32::MAX, 0);
        for value in values {
            let size = value.to_bits() & 0x7fff_ffff;
            // Zero becomes the largest.
            least = least.min(size.wrapping_sub(1));
            most = most.max(size);
        }
        Self { least: least.saturating_add(1) >> 23, most: most >> 23 }
    }

    /// Whether the values are normal numbers and zeros.
    pub(super) fn are_normal(self) -> bool {
        self.least > 0 && self.most < 255
    }

    /// Whether tiles add the products of BF16 values of these sizes as FP32 instructions do. They take subnormal numbers for
    /// zero, so that no value, product or sum may be one: where every product is a multiple of 2^-126, every sum is. And
    /// nothing is to overflow.
    pub(super) fn add_alike(self, other: Self) -> bool {
        // Of the two exponents together, with eight bits of precision each.
        let no_underflow = self.least + other.least >= 2 * 127 + 2 * 7 - 126;
        let no_overflow = self.most + other.most < 2 * 127 + 96;
        self.are_normal() && other.are_normal() && no_underflow && no_overflow
    }
}

/// Whether values are BF16, as the callers of all levels promise: tiles would leave lower bits out.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn are_bf16(values: &[f32]) -> bool {
    values.iter().fold(0, |all, value| all | value.to_bits()) & 0xffff == 0
}

/// Up to sixteen activation rows as tiles: `[half of the lanes][group][lane][pair][row]`. Missing rows and terms are zeros.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn pack(x: &[f32], depth: usize) -> Aligned<u32> {
    let groups = depth.div_ceil(GROUP);
    let mut out = Aligned::<u32>::zeros(LANES / TOGETHER * groups * TILES);
    for (group, start) in (0..depth).step_by(GROUP).enumerate() {
        for first in (0..RUNS).step_by(SIDE) {
            let mut pairs = [_mm512_setzero_si512(); SIDE];
            for (pairs, x) in pairs.iter_mut().zip(x.chunks_exact(depth)) {
                let terms = |from: usize| {
                    let mask = ((1u32 << depth.saturating_sub(from).min(SIDE)) - 1) as u16;
                    // SAFETY: the mask leaves only terms of the row.
                    unsafe { _mm512_maskz_loadu_epi32(mask, x.as_ptr().wrapping_add(from).cast()) }
                };
                let (one, two) = (terms(start + first), terms(start + RUNS + first));
                *pairs = _mm512_or_si512(_mm512_srli_epi32::<16>(one), two);
            }
            for (term, pairs) in (first..).zip(transposed(pairs)) {
                let (pair, lane) = (term / LANES, term % LANES);
                let tile = (lane / TOGETHER * groups + group) * TOGETHER + lane % TOGETHER;
                let to = &mut out[tile * TILE + pair * SIDE..][..SIDE];
                // SAFETY: sixteen pairs.
                unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs) };
            }
        }
    }
    out
}

/// The lanes of sixteen sums, the next lane's `stride` further, added in adjacent pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn tree(sums: &[f32], stride: usize) -> __m512 {
    assert!(sums.len() >= (LANES - 1) * stride + SIDE);
    // SAFETY: sixteen sums, inside by the assertion.
    let lane = |lane: usize| unsafe { _mm512_loadu_ps(sums.as_ptr().add(lane * stride)) };
    let two = |at: usize| _mm512_add_ps(lane(at), lane(at + 1));
    let four = |at: usize| _mm512_add_ps(two(at), two(at + 2));
    _mm512_add_ps(four(0), four(4))
}
