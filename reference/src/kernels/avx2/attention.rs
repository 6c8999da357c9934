//! Both products of attention.

use std::arch::x86_64::*;

use half::bf16;

use super::{tree, widen_eight};
use crate::kernels::level::{Kernels, ValueTile, Weighted};
use crate::kernels::plain::Plain;
use crate::kernels::sum::{LANES, RUNS};
use crate::kernels::upcoming::Upcoming;

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
pub(in crate::kernels) use up_to_five;

/// [`Kernels::scores`]: two keys are widened on the way and meet up to five queries each.
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) fn scores(q: &[f32], keys: &[&[bf16]], upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
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
                crate::kernels::sum::tree(&mut lanes)
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
pub(in crate::kernels) fn weighted(values: Weighted<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
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
