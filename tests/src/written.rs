//! Sparse cache rows as a map that tests edit.

use std::collections::BTreeMap;

use device::{Captured, WrittenRows};
use half::bf16;
use ndarray::{Array1, Array2};
use reference::Geometry;

/// New contents by cache row.
pub type Rows = BTreeMap<i64, Vec<bf16>>;

/// The rows of a capture.
#[must_use]
pub fn read(written: &WrittenRows) -> Rows {
    let (rows, values) = (written.rows.values().unwrap(), written.values.values().unwrap());
    rows.iter().copied().zip(values.rows().into_iter().map(|row| row.to_vec())).collect()
}

/// A capture of rows.
#[must_use]
pub fn write(rows: &Rows, geometry: &Geometry) -> WrittenRows {
    let values = rows.values().flatten().copied().collect();
    WrittenRows {
        rows: Captured::Values(rows.keys().copied().collect::<Array1<i64>>()),
        values: Captured::Values(Array2::from_shape_vec((rows.len(), geometry.head_dim), values).unwrap()),
    }
}

/// Edits the rows of a capture.
pub fn edit(written: &mut Option<WrittenRows>, geometry: &Geometry, change: impl FnOnce(&mut Rows)) {
    let mut rows = read(written.as_ref().expect("the capture lists written rows"));
    change(&mut rows);
    *written = Some(write(&rows, geometry));
}
