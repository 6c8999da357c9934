//! Tiles of BF16 products in the orders that only devices use, drawn or emulated, and exact ones for the bounds.
//! Safe loops, compiled for the CPU's vector level: each output's operations and their order are the same on every
//! level. Activations are `[K, rows]`, weights `[K, N]`, results `[rows, N]`.

use half::bf16;
use pulp::{Arch, NullaryFnOnce, Simd, WithSimd};

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
fn widen(row: &[bf16], wide: &mut [f32]) {
    for (slot, weight) in wide.iter_mut().zip(row) {
        *slot = f32::from_bits(u32::from(weight.to_bits()) << 16);
    }
}

/// A tile summed into one accumulator an output, in the order given.
struct PermutedTile<'a, 'w> {
    x: &'a [f32],
    w: Block<'w, bf16>,
    order: &'a [u32],
    out: &'a mut [f32],
}

impl WithSimd for PermutedTile<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // Accumulators for as many rows and vectors as there are registers for.
        match S::F32_LANES {
            16.. => self.run::<S, 8, 2>(simd),
            8.. => self.run::<S, 4, 2>(simd),
            _ => self.run::<S, 2, 8>(simd),
        }
    }
}

impl PermutedTile<'_, '_> {
    /// `VECTORS` vectors of columns at a time. Their weights are widened once, side by side, so that reading them in
    /// the order given stays within the cache.
    #[inline(always)]
    fn run<S: Simd, const ROWS: usize, const VECTORS: usize>(mut self, simd: S) {
        let (width, depth) = (self.w.width(), self.w.rows());
        let rows = self.x.len() / depth.max(1);
        let columns = VECTORS * S::F32_LANES;
        let mut wide = vec![0f32; depth * columns];
        for start in (0..width).step_by(columns) {
            let end = width.min(start + columns);
            for (k, wide) in wide.chunks_exact_mut(columns).enumerate() {
                widen(&self.w.row(k)[start..end], wide);
            }
            let (weights, _) = S::as_simd_f32s(&wide);
            let mut row = 0;
            while row < rows {
                let left = rows - row;
                row += if ROWS >= 8 && left >= 8 {
                    self.rows::<S, 8, VECTORS>(simd, weights, row, start, end)
                } else if ROWS >= 4 && left >= 4 {
                    self.rows::<S, 4, VECTORS>(simd, weights, row, start, end)
                } else if left >= 2 {
                    self.rows::<S, 2, VECTORS>(simd, weights, row, start, end)
                } else {
                    self.rows::<S, 1, VECTORS>(simd, weights, row, start, end)
                };
            }
        }
    }

    /// `ROWS` rows from `row` on, over the columns `start..end`; returns `ROWS`. The fused step rounds once, like an
    /// addition, because the product of two BF16 values is exact.
    #[inline(always)]
    fn rows<S: Simd, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        simd: S,
        weights: &[S::f32s],
        row: usize,
        start: usize,
        end: usize,
    ) -> usize {
        let (width, rows) = (self.w.width(), self.x.len() / self.w.rows().max(1));
        let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
        for &k in self.order {
            let k = k as usize;
            let x = &self.x[k * rows + row..][..ROWS];
            let w = &weights[k * VECTORS..][..VECTORS];
            for (sums, &x) in sums.iter_mut().zip(x) {
                let x = simd.splat_f32s(x);
                for (sum, &w) in sums.iter_mut().zip(w) {
                    *sum = simd.mul_add_f32s(x, w, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let out = &mut self.out[(row + r) * width + start..(row + r) * width + end];
            for (out, &sum) in out.chunks_mut(S::F32_LANES).zip(sums) {
                simd.partial_store_f32s(out, sum);
            }
        }
        ROWS
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

#[cfg(test)]
mod tests {
    use ndarray::Array2;
    use proptest::prelude::*;

    use super::*;
    use crate::elementary::mix;
    use crate::policy::Freedom;

    /// Every level that this CPU has.
    fn levels() -> Vec<Arch> {
        #[cfg(target_arch = "x86_64")]
        let vector = [pulp::x86::V3::try_new().map(Arch::V3), pulp::x86::V4::try_new().map(Arch::V4)];
        #[cfg(not(target_arch = "x86_64"))]
        let vector: [Option<Arch>; 0] = [];
        std::iter::once(Arch::Scalar).chain(vector.into_iter().flatten()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn every_level_adds_as_the_order_says(rows in 1usize..18, depth in 1usize..70, columns in 1usize..65, seed: u64) {
            let value = |i: usize, seed: u64| bf16::from_f32(f32::from(mix(seed ^ i as u64) as i16) * 1.7e-4);
            let x: Vec<f32> = (0..depth * rows).map(|i| value(i, seed).to_f32()).collect();
            let w = Array2::from_shape_fn((depth, columns), |(k, n)| value(k * columns + n, !seed));
            let block = Block::new(w.view()).unwrap();
            let order = SumOrder::cube(Freedom::Sampled { seed }, depth);
            let SumOrder::Permuted(terms) = &order else { unreachable!() };
            for level in levels() {
                let mut sums = vec![f32::NAN; rows * columns];
                level.dispatch(PermutedTile { x: &x, w: block, order: terms, out: &mut sums });
                let mut exact = vec![(f64::NAN, f32::NAN); rows * columns];
                level.dispatch(ExactTile { x: &x, w: block, out: &mut exact });
                for (i, (sum, exact)) in sums.into_iter().zip(exact).enumerate() {
                    let (row, n) = (i / columns, i % columns);
                    let term = |k: usize| x[k * rows + row] * w[(k, n)].to_f32();
                    prop_assert_eq!(sum.to_bits(), order.sum(depth, term).to_bits(), "{:?} {} {}", level, row, n);
                    let both = (0..depth).map(term).fold((0f64, 0f32), |(sum, squares), product| {
                        (sum + f64::from(product), squares + product * product)
                    });
                    prop_assert_eq!(exact, both, "{:?} {} {}", level, row, n);
                }
            }
        }
    }
}
