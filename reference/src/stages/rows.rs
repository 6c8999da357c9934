//! Which rows of the batch a run computes. Padding rows that replicate row 0 are equal to it in every tensor, so that
//! a run of the whole table holds each tensor's distinct rows only; whoever reads one afterwards sees all sixteen.

use std::sync::{Arc, OnceLock};

use half::bf16;
use half::slice::HalfFloatSliceExt;
use ndarray::{Array2, Axis};

use super::contiguous;
use crate::geometry::BATCH;
use crate::inputs::LayerInputs;
use crate::tensor::{Tensor, TensorId};

/// The rows of the batch that are computed, and for each row of the batch the one that has its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Rows of the batch, ascending; the first `count` count.
    computed: [usize; BATCH],
    count: usize,
    /// For each row of the batch an index into `computed`.
    of_row: [usize; BATCH],
}

impl Rows {
    /// Every row for itself.
    pub(crate) fn all() -> Self {
        let each = std::array::from_fn(|b| b);
        Self { computed: each, count: BATCH, of_row: each }
    }

    /// Each row but the padding rows that replicate row 0 through the whole layer: they have its input and position,
    /// and step 8 gives them its attention, so that all else is equal too.
    pub(crate) fn distinct(inputs: &LayerInputs<'_>) -> Self {
        let (x, batch) = (inputs.hidden_states, inputs.batch);
        let equal = |b: usize| bits(&contiguous(x.row(b))) == bits(&contiguous(x.row(0)));
        let mut rows = Self { computed: [0; BATCH], count: 0, of_row: [0; BATCH] };
        for b in 0..BATCH {
            if b == 0 || b < batch.active || batch.seq_lens[b] != batch.seq_lens[0] || !equal(b) {
                rows.computed[rows.count] = b;
                rows.of_row[b] = rows.count;
                rows.count += 1;
            }
        }
        rows
    }

    /// The rows of the batch that are computed, ascending.
    pub(crate) fn computed(&self) -> &[usize] {
        &self.computed[..self.count]
    }

    /// Where the values of row `b` of the batch are: an index into [`Rows::computed`].
    pub(crate) fn of(&self, b: usize) -> usize {
        self.of_row[b]
    }

    /// Whether every row is computed.
    fn are_all(&self) -> bool {
        self.count == BATCH
    }

    /// The tensor with all rows of the batch, from one with the computed ones. `blocks` such tensors may lie one after
    /// the other, and a row of the batch may be several rows of the tensor.
    fn replicated<T: Copy>(&self, values: &Array2<T>, blocks: usize) -> Array2<T> {
        let height = values.nrows() / (blocks * self.count);
        let sources = (0..blocks).flat_map(|block| {
            self.of_row.iter().flat_map(move |row| (0..height).map(move |n| (block * self.count + row) * height + n))
        });
        values.select(Axis(0), &sources.collect::<Vec<_>>())
    }
}

/// The bits of BF16 values: NaN equals itself, and zeros of two signs differ.
fn bits(values: &[bf16]) -> &[u16] {
    values.reinterpret_cast()
}

/// A value of a run, computed for some rows, and for all rows of the batch once somebody asks.
#[derive(Debug)]
pub(super) struct Replicated<T> {
    computed: Arc<T>,
    /// The rows that `computed` has, where not all.
    rows: Option<Rows>,
    all: OnceLock<Arc<T>>,
}

impl<T: Replicate> Replicated<T> {
    /// A value that stands for itself.
    pub(super) fn whole(value: Arc<T>) -> Self {
        Self { computed: value, rows: None, all: OnceLock::new() }
    }

    /// The same value known to have `rows` only.
    pub(super) fn of_rows(&self, rows: Rows) -> Self {
        let rows = (!rows.are_all()).then_some(rows);
        Self { computed: Arc::clone(&self.computed), rows, all: OnceLock::new() }
    }

    /// The value for all rows of the batch.
    pub(super) fn get(&self, id: TensorId) -> &Arc<T> {
        match self.rows {
            None => &self.computed,
            Some(rows) => self.all.get_or_init(|| Arc::new(self.computed.replicate(&rows, blocks(id)))),
        }
    }
}

/// How often all rows of the batch follow one another in a tensor.
pub(super) fn blocks(id: TensorId) -> usize {
    // The two halves of the down projection.
    if id == TensorId::DownAccParts { 2 } else { 1 }
}

/// What can be given all rows of the batch.
pub(super) trait Replicate {
    /// [`Rows::replicated`].
    fn replicate(&self, rows: &Rows, blocks: usize) -> Self;
}

impl Replicate for Array2<f32> {
    fn replicate(&self, rows: &Rows, blocks: usize) -> Self {
        rows.replicated(self, blocks)
    }
}

impl Replicate for Tensor {
    fn replicate(&self, rows: &Rows, blocks: usize) -> Self {
        match self {
            Self::Bf16(values) => Self::Bf16(rows.replicated(values, blocks)),
            Self::F32(values) => Self::F32(rows.replicated(values, blocks)),
            Self::I8(values) => Self::I8(rows.replicated(values, blocks)),
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::s;

    use super::*;

    #[test]
    fn every_row_gets_the_values_of_the_one_that_was_computed_for_it() {
        // Rows 0, 1 and 5 were computed; all others are row 0.
        let mut of_row = [0; BATCH];
        (of_row[1], of_row[5]) = (1, 2);
        let mut computed = [0; BATCH];
        computed[..3].copy_from_slice(&[0, 1, 5]);
        let rows = Rows { computed, count: 3, of_row };
        // Two rows of the tensor for each row of the batch, two blocks: element = 100 * block + 10 * row + n.
        let value = |block: usize, b: usize, n: usize| (100 * block + 10 * b + n) as f32;
        let values = Array2::from_shape_fn((12, 1), |(i, _)| value(i / 6, rows.computed()[i % 6 / 2], i % 2));
        let all = values.replicate(&rows, 2);
        assert_eq!(all.dim(), (4 * BATCH, 1));
        for (i, &found) in all.slice(s![.., 0]).iter().enumerate() {
            let (block, b, n) = (i / (2 * BATCH), i % (2 * BATCH) / 2, i % 2);
            assert_eq!(found, value(block, if b == 1 || b == 5 { b } else { 0 }, n), "{i}");
        }
    }
}
