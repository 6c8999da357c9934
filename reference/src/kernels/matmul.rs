//! Matrix products over weights in the kernel's layout, `[in, out]`. Columns are split over threads in
//! tiles; a tile streams its weights once for all distinct rows. The loops are plain Rust, compiled for the
//! CPU's vector level: each output's operations and their order are the same on every level.

use half::bf16;
use ndarray::{Array2, ArrayView2, Axis};
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;

use super::sum::{LANES, SumOrder};

/// Output columns of one INT8 tile.
const I8_TILE: usize = 256;
/// Output columns of one BF16 tile.
const BF16_TILE: usize = 64;

/// For each row the index of the first row with the same elements, and the list of those first rows.
/// Replicated padding rows are then computed once.
#[must_use]
pub fn distinct_rows<T: PartialEq>(x: ArrayView2<'_, T>) -> (Vec<usize>, Vec<usize>) {
    let mut first: Vec<usize> = Vec::new();
    let mut of_row = Vec::with_capacity(x.nrows());
    for row in x.rows() {
        let known = first.iter().position(|&r| x.row(r) == row);
        of_row.push(known.unwrap_or(first.len()));
        if known.is_none() {
            first.push(of_row.len() - 1);
        }
    }
    (of_row, first)
}

/// Computes `columns` outputs in tiles on all threads and copies each distinct row to its duplicates.
/// `tile(start, width)` returns `[distinct rows, width]`, row-major.
fn by_columns<T: Copy + Default + Send + Sync>(
    of_row: &[usize],
    columns: usize,
    width: usize,
    tile: impl Fn(usize, usize) -> Vec<T> + Sync,
) -> Array2<T> {
    let starts: Vec<usize> = (0..columns).step_by(width).collect();
    let tiles: Vec<Vec<T>> = starts.par_iter().map(|&start| tile(start, width.min(columns - start))).collect();
    let mut out = Array2::default((of_row.len(), columns));
    for (&start, values) in starts.iter().zip(&tiles) {
        let width = width.min(columns - start);
        for (mut row, &distinct) in out.rows_mut().into_iter().zip(of_row) {
            for (n, &value) in values[distinct * width..(distinct + 1) * width].iter().enumerate() {
                row[start + n] = value;
            }
        }
    }
    out
}

/// `x @ w` with exact INT32 sums. `x` is INT8 `[rows, K]`, `w` INT8 `[K, N]`; the result is `[rows, N]`.
/// K up to 2^17 cannot overflow: 128 * 127 * 2^17 < 2^31.
#[must_use]
pub fn matmul_i8(x: ArrayView2<'_, i8>, w: ArrayView2<'_, i8>) -> Array2<i32> {
    let (of_row, first) = distinct_rows(x);
    let codes: Vec<i32> = x.select(Axis(0), &first).t().iter().map(|&code| i32::from(code)).collect();
    let standard = w.as_standard_layout();
    let (arch, columns) = (Arch::new(), w.ncols());
    by_columns(&of_row, columns, I8_TILE, |start, width| {
        let weights = Columns { weights: standard.as_slice().unwrap_or_default(), columns, start, width };
        arch.dispatch(I8Tile { codes: &codes, rows: first.len(), weights })
    })
}

/// A tile of the columns of a row-major weight matrix.
#[derive(Clone, Copy)]
struct Columns<'a, T> {
    weights: &'a [T],
    columns: usize,
    start: usize,
    width: usize,
}

impl<'a, T> Columns<'a, T> {
    /// The tile's part of row `k`.
    #[inline(always)]
    fn row(&self, k: usize) -> &'a [T] {
        let at = k * self.columns + self.start;
        &self.weights[at..at + self.width]
    }

    /// Rows of the matrix.
    #[inline(always)]
    fn depth(&self) -> usize {
        self.weights.len() / self.columns.max(1)
    }
}

/// One tile of an INT8 product. `codes` is `[K, rows]`.
struct I8Tile<'a> {
    codes: &'a [i32],
    rows: usize,
    weights: Columns<'a, i8>,
}

impl NullaryFnOnce for I8Tile<'_> {
    type Output = Vec<i32>;

    #[inline(always)]
    fn call(self) -> Vec<i32> {
        // Four rows of weights at a time, so that an accumulator is loaded and stored once for four products.
        const STEP: usize = 4;
        let (rows, width, depth) = (self.rows, self.weights.width, self.weights.depth());
        let mut acc = vec![0i32; rows * width];
        let mut wide = [[0i32; I8_TILE]; STEP];
        for base in (0..depth).step_by(STEP) {
            for (j, wide) in wide.iter_mut().enumerate() {
                if base + j < depth {
                    for (slot, &weight) in wide.iter_mut().zip(self.weights.row(base + j)) {
                        *slot = i32::from(weight);
                    }
                } else {
                    wide.fill(0);
                }
            }
            for (r, acc) in acc.chunks_exact_mut(width).enumerate() {
                let code = |j: usize| if base + j < depth { self.codes[(base + j) * rows + r] } else { 0 };
                let codes = [code(0), code(1), code(2), code(3)];
                let [w0, w1, w2, w3] = [&wide[0][..width], &wide[1][..width], &wide[2][..width], &wide[3][..width]];
                for n in 0..width {
                    acc[n] += codes[0] * w0[n] + codes[1] * w1[n] + codes[2] * w2[n] + codes[3] * w3[n];
                }
            }
        }
        acc
    }
}

/// `x @ w` in FP32, each output summed in `order`. `x` is `[rows, K]` and holds BF16 values widened, `w`
/// is BF16 `[K, N]`; products of BF16 are exact in FP32. The result is `[rows, N]`.
#[must_use]
pub fn matmul_bf16(x: ArrayView2<'_, f32>, w: ArrayView2<'_, bf16>, order: &SumOrder) -> Array2<f32> {
    let (of_row, values, rows) = distinct_columns(x);
    let standard = w.as_standard_layout();
    let (arch, columns) = (Arch::new(), w.ncols());
    by_columns(&of_row, columns, BF16_TILE, |start, width| {
        let weights = Columns { weights: standard.as_slice().unwrap_or_default(), columns, start, width };
        match order {
            SumOrder::Canonical => {
                arch.dispatch(LaneTile { values: &values, rows, weights, lanes: LANES, order: None })
            }
            SumOrder::Permuted(order) => {
                arch.dispatch(LaneTile { values: &values, rows, weights, lanes: 1, order: Some(order) })
            }
            SumOrder::Cube | SumOrder::VectorChunks(_) => arch.dispatch(CubeTile { values: &values, rows, weights }),
        }
    })
}

/// The distinct rows of `x`, bit by bit: which one each row is, their values as `[K, distinct]`, their count.
fn distinct_columns(x: ArrayView2<'_, f32>) -> (Vec<usize>, Vec<f32>, usize) {
    let bits = x.mapv(f32::to_bits);
    let (of_row, first) = distinct_rows(bits.view());
    let values = x.select(Axis(0), &first).t().iter().copied().collect();
    (of_row, values, first.len())
}

/// One tile of a product summed over lanes: term `i` of the order goes to lane `i % lanes`, then adjacent lanes
/// are added pairwise.
struct LaneTile<'a> {
    values: &'a [f32],
    rows: usize,
    weights: Columns<'a, bf16>,
    lanes: usize,
    order: Option<&'a [u32]>,
}

impl NullaryFnOnce for LaneTile<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn call(self) -> Vec<f32> {
        // Terms of a lane that are added one after the other while its accumulators are in registers.
        const RUN: usize = 4;
        let (rows, width, depth, lanes) = (self.rows, self.weights.width, self.weights.depth(), self.lanes);
        let mut acc = vec![0f32; rows * lanes * width];
        let mut wide = [[0f32; BF16_TILE]; RUN * LANES];
        let term = |position: usize| self.order.map_or(position, |order| order[position] as usize);
        let block = RUN * lanes;
        for base in (0..depth).step_by(block) {
            let terms = block.min(depth - base);
            for (i, wide) in wide[..terms].iter_mut().enumerate() {
                for (slot, weight) in wide.iter_mut().zip(self.weights.row(term(base + i))) {
                    *slot = f32::from_bits(u32::from(weight.to_bits()) << 16);
                }
            }
            for r in 0..rows {
                let value = |i: usize| self.values[term(base + i) * rows + r];
                for lane in 0..lanes {
                    let acc = &mut acc[(r * lanes + lane) * width..][..width];
                    if terms == block {
                        let at = [lane, lane + lanes, lane + 2 * lanes, lane + 3 * lanes];
                        let x = at.map(value);
                        let w = at.map(|i| &wide[i][..width]);
                        for n in 0..width {
                            acc[n] = (((acc[n] + x[0] * w[0][n]) + x[1] * w[1][n]) + x[2] * w[2][n]) + x[3] * w[3][n];
                        }
                    } else {
                        for i in (lane..terms).step_by(lanes) {
                            let (x, w) = (value(i), &wide[i][..width]);
                            for n in 0..width {
                                acc[n] += x * w[n];
                            }
                        }
                    }
                }
            }
        }
        let mut out = vec![0f32; rows * width];
        for (acc, out) in acc.chunks_exact_mut(lanes * width).zip(out.chunks_exact_mut(width)) {
            let mut live = lanes;
            while live > 1 {
                live /= 2;
                for l in 0..live {
                    for n in 0..width {
                        acc[l * width + n] = acc[2 * l * width + n] + acc[(2 * l + 1) * width + n];
                    }
                }
            }
            out.copy_from_slice(&acc[..width]);
        }
        out
    }
}

/// One tile of a product as the emulated cube unit sums it: the exact dot of each 16 terms, rounded into the
/// accumulator.
struct CubeTile<'a> {
    values: &'a [f32],
    rows: usize,
    weights: Columns<'a, bf16>,
}

impl NullaryFnOnce for CubeTile<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn call(self) -> Vec<f32> {
        let (rows, width, depth) = (self.rows, self.weights.width, self.weights.depth());
        let mut acc = vec![0f32; rows * width];
        let mut dots = vec![0f64; rows * width];
        for k in 0..depth {
            let weights = self.weights.row(k);
            for (r, dots) in dots.chunks_exact_mut(width).enumerate() {
                let value = self.values[k * rows + r];
                for (dot, weight) in dots.iter_mut().zip(weights) {
                    *dot += f64::from(value * f32::from_bits(u32::from(weight.to_bits()) << 16));
                }
            }
            if (k + 1) % 16 == 0 || k + 1 == depth {
                for (sum, dot) in acc.iter_mut().zip(&mut dots) {
                    *sum = (f64::from(*sum) + *dot) as f32;
                    *dot = 0.0;
                }
            }
        }
        acc
    }
}

/// The exact product and the sum of its squared terms, for the bounds of [`crate::bounds`]: float64
/// `x @ w` and `x^2 @ w^2`, each `[rows, N]`. Float64 holds 53 bits against the 16 of a product of two
/// BF16 values, so that the first is exact for all purposes of a float32 comparison.
#[must_use]
pub fn exact_bf16_product(x: ArrayView2<'_, f32>, w: ArrayView2<'_, bf16>) -> (Array2<f64>, Array2<f64>) {
    let (of_row, values, rows) = distinct_columns(x);
    let standard = w.as_standard_layout();
    let (arch, columns) = (Arch::new(), w.ncols());
    let both = by_columns(&of_row, columns, BF16_TILE, |start, width| {
        let weights = Columns { weights: standard.as_slice().unwrap_or_default(), columns, start, width };
        arch.dispatch(ExactTile { values: &values, rows, weights })
    });
    (both.mapv(|pair| pair.0), both.mapv(|pair| f64::from(pair.1)))
}

/// One tile of exact sums and sums of squares.
struct ExactTile<'a> {
    values: &'a [f32],
    rows: usize,
    weights: Columns<'a, bf16>,
}

impl NullaryFnOnce for ExactTile<'_> {
    type Output = Vec<(f64, f32)>;

    #[inline(always)]
    fn call(self) -> Vec<(f64, f32)> {
        let (rows, width, depth) = (self.rows, self.weights.width, self.weights.depth());
        let mut sums = vec![0f64; rows * width];
        let mut squares = vec![0f32; rows * width];
        let mut wide = [0f32; BF16_TILE];
        for k in 0..depth {
            for (slot, weight) in wide.iter_mut().zip(self.weights.row(k)) {
                *slot = f32::from_bits(u32::from(weight.to_bits()) << 16);
            }
            let blocks = sums.chunks_exact_mut(width).zip(squares.chunks_exact_mut(width));
            for (r, (sums, squares)) in blocks.enumerate() {
                let value = self.values[k * rows + r];
                let wide = &wide[..width];
                for n in 0..width {
                    let product = value * wide[n];
                    sums[n] += f64::from(product);
                    squares[n] += product * product;
                }
            }
        }
        sums.into_iter().zip(squares).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Freedom;
    use proptest::prelude::*;

    fn codes(rows: usize, columns: usize, seed: u64) -> Array2<i8> {
        Array2::from_shape_fn((rows, columns), |(r, c)| crate::elementary::mix(seed ^ ((r * columns + c) as u64)) as i8)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn int8_products_are_the_integer_sums(rows in 1usize..5, depth in 1usize..70, columns in 1usize..600, seed: u64) {
            let x = codes(rows, depth, seed).mapv(|code| code.max(-127));
            let w = codes(depth, columns, !seed);
            let product = matmul_i8(x.view(), w.view());
            for ((r, n), &value) in product.indexed_iter() {
                let exact: i64 = (0..depth).map(|k| i64::from(x[(r, k)]) * i64::from(w[(k, n)])).sum();
                prop_assert_eq!(i64::from(value), exact);
            }
        }

        #[test]
        fn bf16_products_sum_as_the_order_says(rows in 1usize..4, depth in 1usize..70, columns in 1usize..130, seed: u64) {
            let x = codes(rows, depth, seed).mapv(|code| f32::from(code) * 0.0117_f32)
                .mapv(|v| bf16::from_f32(v).to_f32());
            let w = codes(depth, columns, !seed).mapv(|code| bf16::from_f32(f32::from(code) * 0.003));
            for freedom in [Freedom::Canonical, Freedom::Emulated, Freedom::Sampled { seed }] {
                let order = SumOrder::cube(freedom, depth);
                let product = matmul_bf16(x.view(), w.view(), &order);
                for ((r, n), &value) in product.indexed_iter() {
                    let expected = order.sum(depth, |k| x[(r, k)] * w[(k, n)].to_f32());
                    prop_assert_eq!(value.to_bits(), expected.to_bits());
                }
            }
        }
    }

    #[test]
    fn equal_rows_are_found_and_filled() {
        let x = ndarray::array![[1i8, 2], [3, 4], [1, 2], [3, 4]];
        assert_eq!(distinct_rows(x.view()), (vec![0, 1, 0, 1], vec![0, 1]));
        let w = ndarray::array![[1i8], [-128]];
        assert_eq!(matmul_i8(x.view(), w.view()).into_raw_vec_and_offset().0, [-255, -509, -255, -509]);
    }
}
