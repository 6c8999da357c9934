//! Tiles of BF16 products in the orders that only devices use, drawn or emulated, and exact ones for the bounds.
//! Safe loops, compiled for the CPU's vector level: each output's operations and their order are the same on every
//! level. Activations are `[K, rows]`, weights `[K, N]`, results `[rows, N]`.

use half::bf16;
use pulp::{Arch, NullaryFnOnce};

use super::level::Block;
use super::sum::SumOrder;

/// Columns that a loop keeps widened at a time.
const WIDTH: usize = 64;

/// One tile, each output summed in `order`, which is not the canonical one.
pub(super) fn ordered_tile(x: &[f32], w: Block<'_, bf16>, order: &SumOrder, out: &mut [f32]) {
    match order {
        SumOrder::Permuted(order) => Arch::new().dispatch(PermutedTile { x, w, order, out }),
        SumOrder::Canonical | SumOrder::Cube | SumOrder::VectorChunks(_) => {
            Arch::new().dispatch(CubeTile { x, w, out })
        }
    }
}

/// One tile of exact sums and of sums of squares.
pub(super) fn exact_tile(x: &[f32], w: Block<'_, bf16>, out: &mut [(f64, f32)]) {
    Arch::new().dispatch(ExactTile { x, w, out });
}

#[inline(always)]
fn widen(row: &[bf16], wide: &mut [f32; WIDTH]) {
    for (slot, weight) in wide.iter_mut().zip(row) {
        *slot = f32::from_bits(u32::from(weight.to_bits()) << 16);
    }
}

/// A tile summed into one accumulator in the order given.
struct PermutedTile<'a, 'w> {
    x: &'a [f32],
    w: Block<'w, bf16>,
    order: &'a [u32],
    out: &'a mut [f32],
}

impl NullaryFnOnce for PermutedTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        // Terms that are added one after the other while an accumulator is in a register.
        const RUN: usize = 4;
        let (width, rows) = (self.w.width(), self.x.len() / self.w.rows().max(1));
        self.out.fill(0.0);
        let mut wide = [[0f32; WIDTH]; RUN];
        for terms in self.order.chunks(RUN) {
            for (wide, &k) in wide.iter_mut().zip(terms) {
                widen(self.w.row(k as usize), wide);
            }
            for (r, out) in self.out.chunks_exact_mut(width).enumerate() {
                let value = |i: usize| self.x[terms[i] as usize * rows + r];
                if terms.len() == RUN {
                    let x = [value(0), value(1), value(2), value(3)];
                    let [w0, w1, w2, w3] = [&wide[0][..width], &wide[1][..width], &wide[2][..width], &wide[3][..width]];
                    for n in 0..width {
                        out[n] = (((out[n] + x[0] * w0[n]) + x[1] * w1[n]) + x[2] * w2[n]) + x[3] * w3[n];
                    }
                } else {
                    for (i, wide) in wide[..terms.len()].iter().enumerate() {
                        let x = value(i);
                        for (out, w) in out.iter_mut().zip(wide) {
                            *out += x * w;
                        }
                    }
                }
            }
        }
    }
}

/// A tile as the emulated cube unit sums it: the exact dot of each 16 terms, rounded into the accumulator.
struct CubeTile<'a, 'w> {
    x: &'a [f32],
    w: Block<'w, bf16>,
    out: &'a mut [f32],
}

impl NullaryFnOnce for CubeTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let (width, depth) = (self.w.width(), self.w.rows());
        let rows = self.x.len() / depth.max(1);
        self.out.fill(0.0);
        let mut dots = vec![0f64; rows * width];
        for k in 0..depth {
            let weights = self.w.row(k);
            for (r, dots) in dots.chunks_exact_mut(width).enumerate() {
                let value = self.x[k * rows + r];
                for (dot, weight) in dots.iter_mut().zip(weights) {
                    *dot += f64::from(value * f32::from_bits(u32::from(weight.to_bits()) << 16));
                }
            }
            if (k + 1) % 16 == 0 || k + 1 == depth {
                for (sum, dot) in self.out.iter_mut().zip(&mut dots) {
                    *sum = (f64::from(*sum) + *dot) as f32;
                    *dot = 0.0;
                }
            }
        }
    }
}

/// A tile of exact sums and sums of squares.
struct ExactTile<'a, 'w> {
    x: &'a [f32],
    w: Block<'w, bf16>,
    out: &'a mut [(f64, f32)],
}

impl NullaryFnOnce for ExactTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let (width, depth) = (self.w.width(), self.w.rows());
        let rows = self.x.len() / depth.max(1);
        let mut sums = vec![0f64; rows * width];
        let mut squares = vec![0f32; rows * width];
        let mut wide = [0f32; WIDTH];
        for k in 0..depth {
            widen(self.w.row(k), &mut wide);
            let blocks = sums.chunks_exact_mut(width).zip(squares.chunks_exact_mut(width));
            for (r, (sums, squares)) in blocks.enumerate() {
                let value = self.x[k * rows + r];
                let wide = &wide[..width];
                for n in 0..width {
                    let product = value * wide[n];
                    sums[n] += f64::from(product);
                    squares[n] += product * product;
                }
            }
        }
        for (out, pair) in self.out.iter_mut().zip(sums.into_iter().zip(squares)) {
            *out = pair;
        }
    }
}
