//! The writer of `captures.safetensors`: the same bytes for the same captures, whole or not at all.

use std::collections::BTreeMap;
use std::path::Path;

use ndarray::{Array, Dimension};
use reference::Tensor;
use safetensors::Dtype;
use serde::Serialize;

use crate::atomic::write_atomically;
use crate::captures::{CaptureError, CaptureFault, Captured, Captures, Element};
use crate::header::Entry;

/// Writes captures so that [`Captures::open`] reads the same back. Tensors follow one another from the
/// widest element type to the narrowest, then by name, which leaves each aligned to its elements.
///
/// # Errors
/// A tensor of the wrong element type holds no values to write; or the file system refuses.
pub fn write_captures(path: &Path, captures: &Captures) -> Result<(), CaptureError> {
    let failed = |fault| CaptureError { path: path.to_path_buf(), fault: Box::new(fault) };
    let bytes = serialize(captures).map_err(failed)?;
    write_atomically(path, &bytes).map_err(|error| failed(error.into()))
}

/// Tensors on their way to a file.
#[derive(Default)]
struct Sink(Vec<(String, Dtype, Vec<usize>, Vec<u8>)>);

impl Sink {
    fn add<T: Element, D: Dimension>(
        &mut self,
        name: &str,
        captured: &Captured<Array<T, D>>,
    ) -> Result<(), CaptureFault> {
        match captured {
            Captured::Values(values) => {
                self.values(name, values);
                Ok(())
            }
            Captured::WrongDType { found, .. } => {
                Err(CaptureFault::Unwritable { tensor: name.into(), found: found.clone() })
            }
        }
    }

    fn values<T: Element, D: Dimension>(&mut self, name: &str, values: &Array<T, D>) {
        let mut bytes = Vec::with_capacity(values.len() * size_of::<T>());
        // Iteration is in logical order, so a transposed or strided array is written as it reads.
        values.iter().for_each(|value| value.encode(&mut bytes));
        self.0.push((name.into(), T::DTYPE, values.shape().to_vec(), bytes));
    }
}

fn serialize(captures: &Captures) -> Result<Vec<u8>, CaptureFault> {
    let mut sink = Sink::default();
    for (id, captured) in &captures.tensors {
        let name = id.name();
        match captured {
            Captured::Values(Tensor::Bf16(values)) => sink.values(name, values),
            Captured::Values(Tensor::F32(values)) => sink.values(name, values),
            Captured::Values(Tensor::I8(values)) => sink.values(name, values),
            Captured::WrongDType { found, .. } => {
                return Err(CaptureFault::Unwritable { tensor: name.into(), found: found.clone() });
            }
        }
    }
    for (rows, values, written) in [
        ("k_written_rows", "k_written_values", &captures.k_written),
        ("v_written_rows", "v_written_values", &captures.v_written),
    ] {
        if let Some(written) = written {
            sink.add(rows, &written.rows)?;
            sink.add(values, &written.values)?;
        }
    }
    let tokens = &captures.tokens;
    tokens.token_ids.iter().try_for_each(|captured| sink.add("token_ids", captured))?;
    tokens.top2_ids.iter().try_for_each(|captured| sink.add("top2_ids", captured))?;
    tokens.top2_logits.iter().try_for_each(|captured| sink.add("top2_logits", captured))?;
    tokens.prefill_hidden.iter().try_for_each(|captured| sink.add("prefill_hidden", captured))?;
    tokens.decode_hidden.iter().try_for_each(|captured| sink.add("decode_hidden", captured))?;
    assemble(sink, &captures.metadata)
}

/// The header as JSON. The format's own writer keeps metadata in hash order; this one is deterministic.
#[derive(Serialize)]
struct HeaderJson<'a> {
    #[serde(rename = "__metadata__", skip_serializing_if = "BTreeMap::is_empty")]
    metadata: &'a BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: BTreeMap<&'a str, Entry>,
}

fn assemble(sink: Sink, metadata: &BTreeMap<String, String>) -> Result<Vec<u8>, CaptureFault> {
    let mut parts = sink.0;
    parts.sort_by(|(left_name, left, ..), (right_name, right, ..)| {
        right.bitsize().cmp(&left.bitsize()).then_with(|| left_name.cmp(right_name))
    });
    let mut end = 0;
    let mut tensors = BTreeMap::new();
    for (name, dtype, shape, bytes) in &parts {
        let begin = end;
        end += bytes.len();
        tensors.insert(name.as_str(), Entry { dtype: *dtype, shape: shape.clone(), data_offsets: (begin, end) });
    }
    let mut header = serde_json::to_vec(&HeaderJson { metadata, tensors }).map_err(crate::header::HeaderError::from)?;
    header.resize(header.len().next_multiple_of(8), b' ');

    let mut bytes = Vec::with_capacity(8 + header.len() + end);
    bytes.extend((header.len() as u64).to_le_bytes());
    bytes.extend(header);
    for (.., data) in &parts {
        bytes.extend(data);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
