//! The plain level: the specification of every faster one, and what runs where there is none. One loop an
//! operation, in the order that the contract of the reference gives.

use half::bf16;

use super::level::{Block, Kernels, ValueTile, Weighted};
use super::sum::canonical;
use super::upcoming::Upcoming;
use crate::rounding::{Rounding, round_f32};

/// Plain loops.
#[derive(Clone, Copy, Debug)]
pub struct Plain;

/// The product of an activation row with an output, of which `weight(k)` are the weights.
#[inline(always)]
fn dot(x: &[f32], weight: impl Fn(usize) -> f32) -> f32 {
    canonical(x.len(), |sum, k| x[k].mul_add(weight(k), sum))
}

/// The activation rows of `x`, each `depth` long, with the part of `out` that is theirs.
fn rows<'a, X, O>(
    x: &'a [X],
    depth: usize,
    out: &'a mut [O],
    columns: usize,
) -> impl Iterator<Item = (&'a [X], &'a mut [O])> {
    let row = move |r| x.get(r * depth..(r + 1) * depth).unwrap_or_default();
    out.chunks_exact_mut(columns.max(1)).enumerate().map(move |(r, out)| (row(r), out))
}

impl Kernels for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn needs(&self) -> &'static str {
        "any CPU"
    }

    fn i8_outputs(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
        for (x, out) in rows(x, w.width(), out, w.rows()) {
            for (n, out) in out.iter_mut().enumerate() {
                *out = x.iter().zip(w.row(n)).map(|(&x, &w)| i32::from(x) * i32::from(w)).sum();
            }
        }
    }

    fn i8_columns(&self, x: &[i8], w: Block<'_, i8>, out: &mut [i32]) {
        out.fill(0);
        for (x, out) in rows(x, w.rows(), out, w.width()) {
            for (k, &x) in x.iter().enumerate() {
                for (out, &w) in out.iter_mut().zip(w.row(k)) {
                    *out += i32::from(x) * i32::from(w);
                }
            }
        }
    }

    fn bf16_outputs(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        for (x, out) in rows(x, w.width(), out, w.rows()) {
            for (n, out) in out.iter_mut().enumerate() {
                let w = w.row(n);
                *out = dot(x, |k| w[k].to_f32());
            }
        }
    }

    fn bf16_columns(&self, x: &[f32], w: Block<'_, bf16>, out: &mut [f32]) {
        for (x, out) in rows(x, w.rows(), out, w.width()) {
            for (n, out) in out.iter_mut().enumerate() {
                *out = dot(x, |k| w.row(k)[n].to_f32());
            }
        }
    }

    fn scaled_outputs(&self, x: &[f32], w: Block<'_, i8>, scale: &[f32], out: &mut [f32]) {
        for (x, out) in rows(x, w.width(), out, w.rows()) {
            for ((n, out), &scale) in out.iter_mut().enumerate().zip(scale) {
                let w = w.row(n);
                *out = dot(x, |k| round_f32(f32::from(w[k]) * scale, Rounding::Rne));
            }
        }
    }

    fn scores(&self, q: &[f32], keys: &[&[bf16]], _: &mut Upcoming<'_>, out: &mut [f32]) {
        let dim = keys.first().map_or(0, |key| key.len());
        for (q, out) in rows(q, dim, out, keys.len()) {
            for (out, key) in out.iter_mut().zip(keys) {
                *out = dot(q, |d| key[d].to_f32());
            }
        }
    }

    fn weighted(&self, values: Weighted<'_>, _: &mut Upcoming<'_>, out: &mut [f32]) {
        let dim = values.dim().max(1);
        for ValueTile { p, stride, factors, values } in values.tiles() {
            for ((p, [a, c]), out) in p.chunks(stride).zip(factors).zip(out.chunks_exact_mut(dim)) {
                for (d, out) in out.iter_mut().enumerate() {
                    let add = |sum, (p, value): (&f32, &&[bf16])| p.mul_add(value[d].to_f32(), sum);
                    *out = *out * a + p.iter().zip(values).fold(0.0, add) * c;
                }
            }
        }
    }

    fn i8_burst(&self, steps: u64) -> u64 {
        const WIDTH: usize = 256;
        let (x, w) = ([3i8; WIDTH], [std::hint::black_box(5i8); WIDTH]);
        let mut sum = 0i32;
        for _ in 0..steps {
            let w = std::hint::black_box(&w);
            sum = sum.wrapping_add(
                std::hint::black_box(&x).iter().zip(w).map(|(&x, &w)| i32::from(x) * i32::from(w)).sum::<i32>(),
            );
        }
        std::hint::black_box(sum);
        steps * WIDTH as u64
    }

    fn f32_burst(&self, steps: u64) -> u64 {
        let mut sums = [1f32; 64];
        let (x, w) = (std::hint::black_box(0.5f32), std::hint::black_box(1.0f32));
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = sum.mul_add(x, w);
            }
        }
        std::hint::black_box(sums);
        steps * sums.len() as u64
    }
}
