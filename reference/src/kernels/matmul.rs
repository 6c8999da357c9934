//! Matrix products: rows that are equal are computed once, output columns are split over threads in tiles, and each
//! tile goes to the level in use, in the layout in which the weights lie.

use bytemuck::cast_slice;
use half::bf16;
use ndarray::{Array2, ArrayView2, Axis};
use rayon::prelude::*;

use super::level::{Block, kernels};
use super::ordered::{exact_tile, ordered_tile};
use super::sum::{LANES, SumOrder};
use crate::inputs::DownWeight;

/// Outputs of a tile whose weights are summed in an order of a device's.
const ORDERED_TILE: usize = 64;

/// Outputs of a tile, of `outputs` in all: at most about `most`, and as many tiles as divide evenly among threads.
/// Only time depends on it.
fn tile_width(outputs: usize, most: usize) -> usize {
    let tiles = outputs.div_ceil(most.max(1)).next_multiple_of(rayon::current_num_threads());
    outputs.div_ceil(tiles.max(1)).next_multiple_of(64)
}

/// Bytes of sums that a tile may hold while it reads weights that lie term by term: they are read and written again and
/// again, and should stay in a core's own cache.
const COLUMNS_SUMS: usize = 3 << 18;
/// Outputs of a tile whose weights lie output by output.
const OUTPUTS_TILE: usize = 1536;

/// For each row the index of the first row with the same elements, and the list of those first rows.
/// Replicated padding rows are then computed once.
#[must_use]
pub fn distinct_rows<T: PartialEq>(x: ArrayView2<'_, T>) -> (Vec<usize>, Vec<usize>) {
    distinct(x.nrows(), |a, b| x.row(a) == x.row(b))
}

/// [`distinct_rows`] of FP32 values, compared bit by bit.
fn distinct_values(x: ArrayView2<'_, f32>) -> (Vec<usize>, Vec<usize>) {
    distinct(x.nrows(), |a, b| match (x.row(a).to_slice(), x.row(b).to_slice()) {
        // As integers: a comparison of memory.
        (Some(a), Some(b)) => cast_slice::<f32, u32>(a) == cast_slice::<f32, u32>(b),
        _ => x.row(a).iter().zip(x.row(b)).all(|(a, b)| a.to_bits() == b.to_bits()),
    })
}

/// [`distinct_rows`] of rows that `equal` compares.
fn distinct(rows: usize, equal: impl Fn(usize, usize) -> bool) -> (Vec<usize>, Vec<usize>) {
    let mut first: Vec<usize> = Vec::new();
    let mut of_row = Vec::with_capacity(rows);
    for row in 0..rows {
        let known = first.iter().position(|&other| equal(other, row));
        of_row.push(known.unwrap_or(first.len()));
        if known.is_none() {
            first.push(row);
        }
    }
    (of_row, first)
}

/// Computes `columns` outputs in tiles of `width` on all threads. `tile(start, width, sums)` fills `[distinct rows,
/// width]`, row-major; `finish(row, start, sums, out)` makes of a row of it what the result holds, for each row that has
/// these sums.
fn by_columns<T: Copy + Default, U: Copy + Default + Send + Sync>(
    of_row: &[usize],
    distinct: usize,
    columns: usize,
    width: usize,
    tile: impl Fn(usize, usize, &mut [T]) + Sync,
    finish: impl Fn(usize, usize, &[T], &mut [U]) + Sync,
) -> Array2<U> {
    let mut out = Array2::default((of_row.len(), columns));
    if out.is_empty() {
        return out;
    }
    out.axis_chunks_iter_mut(Axis(1), width).into_par_iter().enumerate().for_each(|(index, mut out)| {
        let (start, width) = (index * width, out.ncols());
        let mut sums = vec![T::default(); distinct * width];
        tile(start, width, &mut sums);
        for ((row, mut out), &from) in out.rows_mut().into_iter().enumerate().zip(of_row) {
            if let Some(out) = out.as_slice_mut() {
                finish(row, start, &sums[from * width..(from + 1) * width], out);
            }
        }
    });
    out
}

/// The sums themselves as the result of [`by_columns`].
fn as_they_are<T: Copy>(_: usize, _: usize, sums: &[T], out: &mut [T]) {
    out.copy_from_slice(sums);
}

/// How a weight matrix that is logically `[K, N]` lies in memory.
#[derive(Clone, Copy, Debug)]
enum Layout<'a, T> {
    /// `[K, N]`, row-major, as the device's kernels hold it: tiles are columns.
    Columns(Block<'a, T>),
    /// `[N, K]`, row-major, as checkpoints hold it: tiles are rows.
    Outputs(Block<'a, T>),
}

impl<'a, T> Layout<'a, T> {
    /// The layout of `w`, read from its strides. `None` where its elements lie neither way.
    fn of(w: ArrayView2<'a, T>) -> Option<Self> {
        let columns = Block::new(w).map(Self::Columns);
        columns.or_else(|| Block::new(w.reversed_axes()).map(Self::Outputs))
    }
}

/// `x @ w` with exact INT32 sums. `x` is INT8 `[rows, K]` without -128, `w` INT8 `[K, N]` in either layout; the
/// result is `[rows, N]`. K up to 2^17 cannot overflow: 128 * 127 * 2^17 < 2^31.
#[must_use]
pub fn matmul_i8(x: ArrayView2<'_, i8>, w: ArrayView2<'_, i8>) -> Array2<i32> {
    matmul_i8_into(x, w, as_they_are)
}

/// [`matmul_i8`] whose sums go through `finish(row, start, sums, out)` while they are at hand: it makes the results of
/// a row from column `start` on.
#[must_use]
pub fn matmul_i8_into<U: Copy + Default + Send + Sync>(
    x: ArrayView2<'_, i8>,
    w: ArrayView2<'_, i8>,
    finish: impl Fn(usize, usize, &[i32], &mut [U]) + Sync,
) -> Array2<U> {
    let Some(layout) = Layout::of(w) else {
        return matmul_i8_into(x, w.as_standard_layout().view(), finish);
    };
    let level = kernels();
    let (of_row, first) = distinct_rows(x);
    let codes = x.select(Axis(0), &first).into_raw_vec_and_offset().0;
    let most = match layout {
        Layout::Columns(_) => COLUMNS_SUMS / (first.len() * size_of::<i32>()).max(1),
        Layout::Outputs(_) => OUTPUTS_TILE,
    };
    let tile = |start, width, out: &mut [i32]| match layout {
        Layout::Columns(block) => level.i8_columns(&codes, block.some_columns(start, width), out),
        Layout::Outputs(block) => level.i8_outputs(&codes, block.some_rows(start, width), out),
    };
    by_columns(&of_row, first.len(), w.ncols(), tile_width(w.ncols(), most), tile, finish)
}

/// `x @ w` in FP32, each output summed in `order`. `x` is `[rows, K]` and holds BF16 values widened, `w`
/// is BF16 `[K, N]` in either layout; products of BF16 are exact in FP32. The result is `[rows, N]`.
#[must_use]
pub fn matmul_bf16(x: ArrayView2<'_, f32>, w: ArrayView2<'_, bf16>, order: &SumOrder) -> Array2<f32> {
    matmul_down(x, DownWeight::Bf16(w), order)
}

/// How a product's weights are read.
enum Reading<'a> {
    /// Where they lie, term by term.
    Columns(Block<'a, bf16>),
    /// Where they lie, output by output.
    Outputs(Block<'a, bf16>),
    /// Where their codes lie, output by output.
    Scaled(Block<'a, i8>, &'a [f32]),
    /// In copied tiles: other layouts, and orders that no level knows.
    Tiles,
}

impl<'a> Reading<'a> {
    /// How to read `w` for sums in `order`.
    fn of(w: DownWeight<'a>, order: &SumOrder) -> Self {
        match (w, order) {
            (DownWeight::Bf16(w), SumOrder::Canonical) => match Layout::of(w) {
                Some(Layout::Columns(block)) => Self::Columns(block),
                Some(Layout::Outputs(block)) => Self::Outputs(block),
                None => Self::Tiles,
            },
            (DownWeight::Int8 { codes, scale }, SumOrder::Canonical) => match (Layout::of(codes), scale.to_slice()) {
                (Some(Layout::Outputs(block)), Some(scale)) => Self::Scaled(block, scale),
                _ => Self::Tiles,
            },
            _ => Self::Tiles,
        }
    }

    /// Outputs of a tile, of `outputs` in all, over `rows` activation rows.
    fn tile(&self, outputs: usize, rows: usize) -> usize {
        match self {
            // A lane has two sums.
            Self::Columns(_) => tile_width(outputs, COLUMNS_SUMS / (rows * 2 * LANES * size_of::<f32>()).max(1)),
            Self::Outputs(_) | Self::Scaled(..) => tile_width(outputs, OUTPUTS_TILE),
            Self::Tiles => ORDERED_TILE,
        }
    }
}

/// [`matmul_bf16`] with a weight that may be held as INT8 codes.
#[must_use]
pub fn matmul_down(x: ArrayView2<'_, f32>, w: DownWeight<'_>, order: &SumOrder) -> Array2<f32> {
    let level = kernels();
    let Distinct { of_row, rows, values } = Distinct::of(x);
    let (columns, reading) = (w.dim().1, Reading::of(w, order));
    let transposed = if matches!(reading, Reading::Tiles) { transposed(&values, rows) } else { Vec::new() };
    let tile = |start, width, out: &mut [f32]| match reading {
        Reading::Columns(block) => level.bf16_columns(&values, block.some_columns(start, width), out),
        Reading::Outputs(block) => level.bf16_outputs(&values, block.some_rows(start, width), out),
        Reading::Scaled(block, scale) => {
            level.scaled_outputs(&values, block.some_rows(start, width), &scale[start..start + width], out);
        }
        Reading::Tiles => {
            let tile = w.columns(start..start + width);
            if let Some(block) = Block::new(tile.view()) {
                match order {
                    SumOrder::Canonical => level.bf16_columns(&values, block, out),
                    order => ordered_tile(&transposed, block, order, out),
                }
            }
        }
    };
    by_columns(&of_row, rows, columns, reading.tile(columns, rows), tile, as_they_are)
}

/// The distinct rows of an activation matrix, compared bit by bit.
#[derive(Debug)]
struct Distinct {
    /// Which distinct row each row is.
    of_row: Vec<usize>,
    /// How many there are.
    rows: usize,
    /// Their values, `[rows, K]`.
    values: Vec<f32>,
}

impl Distinct {
    fn of(x: ArrayView2<'_, f32>) -> Self {
        let (of_row, first) = distinct_values(x);
        let mut values = Vec::with_capacity(first.len() * x.ncols());
        for &row in &first {
            match x.row(row).as_slice() {
                Some(row) => values.extend_from_slice(row),
                None => values.extend(x.row(row)),
            }
        }
        Self { of_row, rows: first.len(), values }
    }
}

/// `[rows, K]` as `[K, rows]`.
fn transposed(values: &[f32], rows: usize) -> Vec<f32> {
    let depth = values.len() / rows.max(1);
    (0..depth).flat_map(|k| (0..rows).map(move |row| values[row * depth + k])).collect()
}

/// The exact product and the sum of its squared terms, for the bounds of [`crate::bounds`]: float64
/// `x @ w` and `x^2 @ w^2`, each `[rows, N]`. Float64 holds 53 bits against the 16 of a product of two
/// BF16 values, so that the first is exact for all purposes of a float32 comparison.
#[must_use]
pub fn exact_bf16_product(x: ArrayView2<'_, f32>, w: DownWeight<'_>) -> (Array2<f64>, Array2<f64>) {
    let distinct = Distinct::of(x);
    let transposed = transposed(&distinct.values, distinct.rows);
    let tile = |start, width, out: &mut [(f64, f32)]| {
        let tile = w.columns(start..start + width);
        if let Some(block) = Block::new(tile.view()) {
            exact_tile(&transposed, block, out);
        }
    };
    let both = by_columns(&distinct.of_row, distinct.rows, w.dim().1, ORDERED_TILE, tile, as_they_are);
    (both.mapv(|pair: (f64, f32)| pair.0), both.mapv(|pair| f64::from(pair.1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Freedom;
    use ndarray::s;
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
    fn products_without_rows_or_outputs_are_empty() {
        let (x, w) = (codes(3, 5, 1), codes(5, 4, 2));
        for (x, w) in [(x.slice(s![..0, ..]), w.view()), (x.view(), w.slice(s![.., ..0]))] {
            let shape = (x.nrows(), w.ncols());
            assert_eq!(matmul_i8(x, w).dim(), shape);
            let (x, w) = (x.mapv(f32::from), w.mapv(|code| bf16::from_f32(f32::from(code))));
            for freedom in [Freedom::Canonical, Freedom::Emulated, Freedom::Sampled { seed: 1 }] {
                assert_eq!(matmul_bf16(x.view(), w.view(), &SumOrder::cube(freedom, 5)).dim(), shape);
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
