//! What the device gave, in the shape in which stages read it: cache rows are spread from their sparse
//! form to what each physical row wrote, tensors of a wrong type are set aside.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use device::{Captured, Captures, WrittenRows};
use half::bf16;
use ndarray::{Array2, ArrayView2};
use reference::inputs::cache_row;
use reference::{BATCH, LayerInputs, Tensor, TensorId};

/// One cache as the device left it.
#[derive(Debug)]
pub struct CacheEvidence {
    /// Position in the capture of each cache row it lists; rows out of range are not in it.
    pub position: BTreeMap<usize, usize>,
    /// Listed rows that the cache does not have.
    pub out_of_range: Vec<i64>,
    /// Rows listed more than once.
    pub repeated: Vec<usize>,
    /// New contents by position, `[n, D]`.
    pub values: Array2<bf16>,
    /// What each physical row's slot holds after the step, `[16, KV*D]`.
    pub rows: Arc<Tensor>,
}

/// Everything the device gave.
#[derive(Debug, Default)]
pub struct Evidence {
    /// Tensors of the contract's type.
    pub tensors: BTreeMap<TensorId, Arc<Tensor>>,
    /// Tensors of another type, with what was found. `k_written_rows` stands under `KRows` too.
    pub wrong_dtype: BTreeMap<TensorId, String>,
    /// The key cache.
    pub k: Option<CacheEvidence>,
    /// The value cache.
    pub v: Option<CacheEvidence>,
    /// Whether the request hides tensors.
    pub hidden: bool,
    /// Counts of work items, attention and online softmax, where captured.
    pub work_items: [Option<u64>; 2],
}

impl Evidence {
    /// Reads the captures of a decode layer. `only`, when given, hides every other tensor.
    pub fn collect(captures: &Captures, inputs: &LayerInputs<'_>, only: Option<&BTreeSet<TensorId>>) -> Self {
        let shown = |id: &TensorId| only.is_none_or(|only| only.contains(id));
        let mut evidence = Self {
            work_items: [captures.attention_work_items(), captures.online_softmax_work_items()],
            hidden: only.is_some(),
            ..Self::default()
        };
        for (&id, captured) in captures.tensors.iter().filter(|(id, _)| shown(id)) {
            match captured {
                Captured::Values(tensor) => {
                    evidence.tensors.insert(id, Arc::new(tensor.clone()));
                }
                Captured::WrongDType { found, .. } => {
                    evidence.wrong_dtype.insert(id, found.clone());
                }
            }
        }
        let caches = [
            (TensorId::KRows, &captures.k_written, inputs.cache.k),
            (TensorId::VRows, &captures.v_written, inputs.cache.v),
        ];
        for (id, written, before) in caches {
            let Some(written) = written.as_ref().filter(|_| shown(&id)) else { continue };
            match cache_evidence(written, inputs, before) {
                Ok(cache) => {
                    evidence.tensors.insert(id, Arc::clone(&cache.rows));
                    if id == TensorId::KRows {
                        evidence.k = Some(cache);
                    } else {
                        evidence.v = Some(cache);
                    }
                }
                Err(found) => {
                    evidence.wrong_dtype.insert(id, found);
                }
            }
        }
        evidence
    }

    /// Says that something is not there to be judged.
    pub fn absent(&self, what: &str) -> String {
        let why = if self.hidden { "not captured, or hidden by the request" } else { "not captured" };
        format!("{what}: {why}")
    }

    /// Evidence of the cache that a tensor of written rows belongs to.
    pub fn cache(&self, id: TensorId) -> Option<&CacheEvidence> {
        match id {
            TensorId::KRows => self.k.as_ref(),
            TensorId::VRows => self.v.as_ref(),
            _ => None,
        }
    }
}

/// Spreads written rows over the batch; `Err` names the type found where it is not the contract's.
fn cache_evidence(
    written: &WrittenRows,
    inputs: &LayerInputs<'_>,
    before: ArrayView2<'_, bf16>,
) -> Result<CacheEvidence, String> {
    let rows = match &written.rows {
        Captured::Values(rows) => rows,
        Captured::WrongDType { found, .. } => return Err(format!("{found} rows")),
    };
    let values = match &written.values {
        Captured::Values(values) => values,
        Captured::WrongDType { found, .. } => return Err(found.clone()),
    };
    let (geometry, dim) = (inputs.geometry, inputs.geometry.head_dim);
    let mut position = BTreeMap::new();
    let (mut out_of_range, mut repeated) = (Vec::new(), Vec::new());
    for (index, &row) in rows.iter().enumerate() {
        match usize::try_from(row).ok().filter(|&row| row < before.nrows()) {
            Some(row) => {
                if position.insert(row, index).is_some() {
                    repeated.push(row);
                }
            }
            None => out_of_range.push(row),
        }
    }
    let mut dense = Array2::from_elem((BATCH, geometry.kv_width()), bf16::ZERO);
    for b in 0..BATCH {
        for kv_head in 0..geometry.num_key_value_heads {
            let row = cache_row(geometry, inputs.batch.slots[b], kv_head);
            let held = match position.get(&row) {
                Some(&index) => values.row(index),
                None => before.row(row),
            };
            dense.slice_mut(ndarray::s![b, kv_head * dim..(kv_head + 1) * dim]).assign(&held);
        }
    }
    Ok(CacheEvidence { position, out_of_range, repeated, values: values.clone(), rows: Arc::new(Tensor::Bf16(dense)) })
}
