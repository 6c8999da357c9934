//! Both products of attention.

use std::arch::x86_64::*;
use std::array::from_fn;

use half::bf16;

use super::ZERO;
use crate::kernels::avx2::up_to_five;
use crate::kernels::level::{ValueTile, Weighted};
use crate::kernels::sum::LANES;
use crate::kernels::upcoming::Upcoming;

/// [`Kernels::scores`] for keys of whole lanes: four keys are widened on the way, two a register, and meet up to five
/// queries each.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn scores(q: &[f32], keys: &[&[bf16]], upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
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
pub(super) const COLUMNS: usize = 64;

/// [`Kernels::weighted`] for values of whole blocks of [`COLUMNS`]: up to five rows of weights at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn weighted(values: Weighted<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
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
