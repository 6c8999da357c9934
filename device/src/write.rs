//! The writer of `captures.safetensors`: the same bytes for the same captures, whole or not at all.

use std::collections::BTreeMap;
use std::path::Path;

use ndarray::{Array, Dimension};
use reference::Tensor;
use safetensors::Dtype;

use crate::captures::{CaptureError, CaptureFault, Captured, Captures, Element};
use cases::header::{Entry, Header};
use cases::write_atomically;

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
pub(crate) struct Sink(Vec<(String, Dtype, Vec<usize>, Vec<u8>)>);

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

    pub(crate) fn values<T: Element, D: Dimension>(&mut self, name: &str, values: &Array<T, D>) {
        let mut bytes = Vec::with_capacity(values.len() * size_of::<T>());
        // Iteration is in logical order, so a transposed or strided array is written as it reads.
        values.iter().for_each(|value| value.encode(&mut bytes));
        self.0.push((name.into(), T::DTYPE, values.shape().to_vec(), bytes));
    }

    /// The bytes of the file.
    pub(crate) fn assemble(self, metadata: &BTreeMap<String, String>) -> Result<Vec<u8>, CaptureFault> {
        assemble(self, metadata)
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
    sink.assemble(&captures.metadata)
}

fn assemble(sink: Sink, metadata: &BTreeMap<String, String>) -> Result<Vec<u8>, CaptureFault> {
    let mut parts = sink.0;
    parts.sort_by(|(left_name, left, ..), (right_name, right, ..)| {
        right.bitsize().cmp(&left.bitsize()).then_with(|| left_name.cmp(right_name))
    });
    let mut end = 0;
    let mut header = Header { metadata: metadata.clone(), ..Header::default() };
    for (name, dtype, shape, bytes) in &parts {
        let begin = end;
        end += bytes.len();
        let entry = Entry { dtype: *dtype, shape: shape.clone(), data_offsets: (begin, end) };
        header.tensors.insert(name.clone(), entry);
    }
    let mut bytes = header.encode()?;
    bytes.reserve(end);
    for (.., data) in &parts {
        bytes.extend(data);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
