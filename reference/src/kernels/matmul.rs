//! Matrix products over weights in the kernel's layout, `[in, out]`. Columns are split over threads in
//! tiles; a tile streams its weights once for all distinct rows.

use half::bf16;
use ndarray::{Array2, ArrayView2, Axis};
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
        for (row, &distinct) in of_row.iter().enumerate() {
            for n in 0..width {
                out[(row, start + n)] = values[distinct * width + n];
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
    let x = x.select(Axis(0), &first);
    by_columns(&of_row, w.ncols(), I8_TILE, |start, width| {
        let mut acc = vec![0i32; x.nrows() * width];
        let mut wide = [0i16; I8_TILE];
        for (k, weights) in w.rows().into_iter().enumerate() {
            for (n, slot) in wide[..width].iter_mut().enumerate() {
                *slot = i16::from(weights[start + n]);
            }
            for (r, acc) in acc.chunks_exact_mut(width).enumerate() {
                let code = i16::from(x[(r, k)]);
                for (sum, &weight) in acc.iter_mut().zip(&wide[..width]) {
                    *sum += i32::from(code) * i32::from(weight);
                }
            }
        }
        acc
    })
}

/// `x @ w` in FP32, each output summed in `order`. `x` is `[rows, K]` and holds BF16 values widened, `w`
/// is BF16 `[K, N]`; products of BF16 are exact in FP32. The result is `[rows, N]`.
#[must_use]
pub fn matmul_bf16(x: ArrayView2<'_, f32>, w: ArrayView2<'_, bf16>, order: &SumOrder) -> Array2<f32> {
    let bits = x.mapv(f32::to_bits);
    let (of_row, first) = distinct_rows(bits.view());
    let x = x.select(Axis(0), &first);
    let depth = w.nrows();
    by_columns(&of_row, w.ncols(), BF16_TILE, |start, width| {
        let mut wide = [0f32; BF16_TILE];
        let mut load = |k: usize| {
            for (n, slot) in wide[..width].iter_mut().enumerate() {
                *slot = w[(k, start + n)].to_f32();
            }
            wide
        };
        let rows = x.nrows();
        match order {
            SumOrder::Canonical | SumOrder::Permuted(_) => {
                let lanes = if matches!(order, SumOrder::Canonical) { LANES } else { 1 };
                let mut acc = vec![0f32; rows * lanes * width];
                for position in 0..depth {
                    let k = if let SumOrder::Permuted(order) = order { order[position] as usize } else { position };
                    let weights = load(k);
                    for r in 0..rows {
                        let at = (r * lanes + position % lanes) * width;
                        let value = x[(r, k)];
                        for (sum, &weight) in acc[at..at + width].iter_mut().zip(&weights[..width]) {
                            *sum += value * weight;
                        }
                    }
                }
                let mut out = vec![0f32; rows * width];
                for r in 0..rows {
                    let mut live = lanes;
                    let at = r * lanes * width;
                    while live > 1 {
                        live /= 2;
                        for l in 0..live {
                            for n in 0..width {
                                acc[at + l * width + n] =
                                    acc[at + 2 * l * width + n] + acc[at + (2 * l + 1) * width + n];
                            }
                        }
                    }
                    out[r * width..(r + 1) * width].copy_from_slice(&acc[at..at + width]);
                }
                out
            }
            SumOrder::Cube | SumOrder::VectorChunks(_) => {
                let mut acc = vec![0f32; rows * width];
                let mut dots = vec![0f64; rows * width];
                for k in 0..depth {
                    let weights = load(k);
                    for r in 0..rows {
                        let value = f64::from(x[(r, k)]);
                        for (dot, &weight) in dots[r * width..(r + 1) * width].iter_mut().zip(&weights[..width]) {
                            *dot += value * f64::from(weight);
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
    })
}

/// The exact product and the sum of its squared terms, for the bounds of [`crate::bounds`]: float64
/// `x @ w` and `x^2 @ w^2`, each `[rows, N]`. Float64 holds 53 bits against the 16 of a product of two
/// BF16 values, so that the first is exact for all purposes of a float32 comparison.
#[must_use]
pub fn exact_bf16_product(x: ArrayView2<'_, f32>, w: ArrayView2<'_, bf16>) -> (Array2<f64>, Array2<f64>) {
    let bits = x.mapv(f32::to_bits);
    let (of_row, first) = distinct_rows(bits.view());
    let x = x.select(Axis(0), &first);
    let both = by_columns(&of_row, w.ncols(), BF16_TILE, |start, width| {
        let mut sums = vec![(0f64, 0f32); x.nrows() * width];
        let mut wide = [0f32; BF16_TILE];
        for (k, weights) in w.rows().into_iter().enumerate() {
            for (n, slot) in wide[..width].iter_mut().enumerate() {
                *slot = weights[start + n].to_f32();
            }
            for (r, sums) in sums.chunks_exact_mut(width).enumerate() {
                let value = x[(r, k)];
                for (sum, &weight) in sums.iter_mut().zip(&wide[..width]) {
                    let product = value * weight;
                    sum.0 += f64::from(product);
                    sum.1 += product * product;
                }
            }
        }
        sums
    });
    (both.mapv(|pair| pair.0), both.mapv(|pair| f64::from(pair.1)))
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
