//! The units in which differences behind a gap are measured, and how far a row is from another in them.

use ndarray::Array2;
use reference::{BATCH, DType, LayerInputs, Tensor, TensorId};

use crate::compare::same;
use crate::place::place;
use crate::spread::Row;

/// Units in which differences of a tensor are measured: the BF16 spacing at an element's size, or at the
/// size of its row where the element is small; one code for INT8.
pub struct Scale {
    pub units: Array2<f64>,
    /// The batch row of each tensor row.
    rows: Vec<usize>,
    /// Whether the tensor is BF16 or INT8, so that small displacements leave most elements in place.
    pub narrowed: bool,
}

impl Scale {
    pub fn new(reference: &Tensor, id: TensorId, inputs: &LayerInputs<'_>) -> Self {
        let [rows, columns] = reference.shape();
        let spacing = |x: f64| if x > 0.0 && x.is_finite() { 2f64.powi(x.log2().floor() as i32 - 7) } else { 1.0 };
        let mut units = Array2::from_elem((rows, columns), 1.0);
        if reference.dtype() != DType::I8 {
            for row in 0..rows {
                let squares: f64 = (0..columns).map(|c| f64::from(reference.get(row, c)).powi(2)).sum();
                let typical = (squares / columns.max(1) as f64).sqrt();
                for column in 0..columns {
                    let mut size = f64::from(reference.get(row, column)).abs().max(typical);
                    if id == TensorId::Out {
                        // The residual that the output is added to may be larger than their sum.
                        size = size.max(inputs.hidden_states[(row, column)].to_f64().abs());
                    }
                    units[(row, column)] = spacing(size);
                }
            }
        }
        let of = |row| place(id, inputs.geometry, row, 0).row;
        Self { units, rows: (0..rows).map(of).collect(), narrowed: reference.dtype() != DType::F32 }
    }

    /// Distance of one element in units; infinite when finiteness differs.
    pub fn distance(&self, a: &Tensor, b: &Tensor, row: usize, column: usize) -> f64 {
        let difference = (f64::from(a.get(row, column)) - f64::from(b.get(row, column))).abs();
        if difference.is_nan() { f64::INFINITY } else { difference / self.units[(row, column)] }
    }

    /// Measures the difference of each batch row from the nominal one.
    pub fn measure(&self, a: &Tensor, nominal: &Tensor, counts: impl Fn(usize, usize) -> bool) -> Vec<Row> {
        (0..BATCH).map(|row| self.measure_row(row, a, nominal, &counts)).collect()
    }

    /// Measures the difference of one batch row from the nominal one.
    pub fn measure_row(
        &self,
        batch_row: usize,
        a: &Tensor,
        nominal: &Tensor,
        counts: impl Fn(usize, usize) -> bool,
    ) -> Row {
        let mut measured = Row::default();
        for (row, _) in self.rows.iter().enumerate().filter(|(_, of)| **of == batch_row) {
            for column in 0..self.units.ncols() {
                measured.elements += 1;
                if counts(row, column) && !same(a, nominal, row, column) {
                    let (x, y) = (a.get(row, column), nominal.get(row, column));
                    measured.energy += self.distance(a, nominal, row, column).powi(2);
                    measured.differing += 1;
                    measured.lean += if (x > y) == (y > 0.0) { 1.0 } else { -1.0 };
                }
            }
        }
        measured.energy /= measured.elements.max(1) as f64;
        measured.lean /= measured.differing.max(1) as f64;
        measured
    }

    /// The least energy that may count against a row: a few elements by one unit, however still the samples were.
    /// FP32 values always move, so that their samples speak for themselves.
    pub fn floor(&self, batch_row: usize) -> f64 {
        if !self.narrowed {
            return 0.0;
        }
        let elements = self.rows.iter().filter(|&&row| row == batch_row).count() * self.units.ncols();
        8.0 / elements.max(1) as f64
    }
}
