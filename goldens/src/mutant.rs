//! What a device with given faults would capture: the reference run with deviations, in the shape of a bundle's
//! captures. It serves to try the gate itself; no such capture is ever a golden.

use std::collections::BTreeMap;

use device::{Captured, Captures, WrittenRows};
use half::bf16;
use ndarray::{Array1, Array2, ArrayView2};
use reference::stages::{Context, run_all};
use reference::{Deviation, LayerInputs, Policy, Products, TensorId};

use crate::cause::written_rows;

/// Runs one decode layer with faults under `policy` and its freedom, and captures every tensor of it.
#[must_use]
pub fn mutant(inputs: &LayerInputs<'_>, policy: &Policy, products: &Products, faults: &[&Deviation]) -> Captures {
    let trace = run_all(Context::new(inputs, policy).sharing(products).tensors_only().deviating(faults));
    let batch = faults.iter().find_map(|fault| fault.written(inputs));
    let written = batch.as_ref().map_or_else(|| inputs.view(), |batch| LayerInputs { batch, ..inputs.view() });
    let mut captures = Captures::default();
    for id in TensorId::ALL {
        if let (Some(tensor), true) = (trace.get(id), TensorId::from_capture_name(id.name()).is_some()) {
            captures.tensors.insert(id, Captured::Values(tensor.as_ref().clone()));
        }
    }
    let rows = |id, before: ArrayView2<'_, bf16>| {
        trace.get(id).map(|rows| changed(written_rows(&written, rows), before, inputs.geometry.head_dim))
    };
    captures.k_written = rows(TensorId::KRows, inputs.cache.k.view());
    captures.v_written = rows(TensorId::VRows, inputs.cache.v.view());
    captures
}

/// The rows whose bytes changed.
fn changed(mut rows: BTreeMap<usize, Vec<bf16>>, before: ArrayView2<'_, bf16>, dim: usize) -> WrittenRows {
    rows.retain(|&row, values| values.iter().zip(before.row(row)).any(|(a, b)| a.to_bits() != b.to_bits()));
    let names: Vec<i64> = rows.keys().map(|&row| row as i64).collect();
    let values: Vec<bf16> = rows.into_values().flatten().collect();
    let values = Array2::from_shape_vec((names.len(), dim), values).unwrap_or_default();
    WrittenRows { rows: Captured::Values(Array1::from(names)), values: Captured::Values(values) }
}
