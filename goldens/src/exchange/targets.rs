//! The tensors of the contract that an entry of a dump may be, each with what the reference has for it.

use cases::{Case, Input, Inputs};
use device::{Captured, Captures};
use safetensors::Dtype;

/// What a map names an entry that is nothing.
pub const IGNORE: &str = "ignore";

/// Rows of the caches that changed, as captures hold them: how many there are is the device's. With their types and
/// dimensions.
const WRITTEN: [(&str, Dtype, usize); 4] = [
    ("k_written_rows", Dtype::I64, 1),
    ("k_written_values", Dtype::BF16, 2),
    ("v_written_rows", Dtype::I64, 1),
    ("v_written_values", Dtype::BF16, 2),
];

/// Which of them an entry's own name ends with, or is.
pub(super) fn written(entry: &str) -> Option<(&'static str, Dtype, usize)> {
    WRITTEN.into_iter().find(|(name, ..)| ends_with(entry, name))
}

/// What a tensor is to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is read, and known to the bit.
    Input,
    /// Half of the columns of a RoPE table, which is read.
    Half,
    /// It is written.
    Output,
    /// A cache: it is read, and known before the run; after it rows of it are written.
    Cache,
}

/// A tensor of the contract.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
    /// What the reference has for it, row-major, little-endian; caches before the run.
    pub bytes: Vec<u8>,
}

impl Target {
    /// Whether an entry's shape is this one; dimensions of one element do not count.
    #[must_use]
    pub fn fits(&self, shape: &[usize]) -> bool {
        let wide = |shape: &[usize]| shape.iter().copied().filter(|&size| size != 1).collect::<Vec<_>>();
        wide(shape) == wide(&self.shape)
    }
}

/// Everything that a dump of the case's layer may hold: its inputs, the halves of its RoPE tables, and what
/// `reference`, the outputs of a right device, holds.
#[must_use]
pub fn targets(case: &Case, inputs: &Inputs, reference: &Captures) -> Vec<Target> {
    let mut targets = Vec::new();
    for tensor in device::input_tensors(case, inputs) {
        let cache = [Input::KCache, Input::VCache].iter().any(|cache| cache.name() == tensor.name);
        if [Input::RopeCos, Input::RopeSin].iter().any(|table| table.name() == tensor.name) {
            targets.extend(halves(tensor.name, &tensor.shape, &tensor.bytes));
        }
        targets.push(Target {
            name: tensor.name.to_owned(),
            kind: if cache { Kind::Cache } else { Kind::Input },
            dtype: tensor.dtype,
            shape: tensor.shape,
            bytes: tensor.bytes.into_owned(),
        });
    }
    for (&id, captured) in &reference.tensors {
        let Captured::Values(tensor) = captured else { continue };
        targets.push(Target {
            name: id.name().to_owned(),
            kind: Kind::Output,
            dtype: device::file_type(id.dtype()),
            shape: id.shape(inputs.geometry()).to_vec(),
            bytes: device::tensor_bytes(tensor),
        });
    }
    targets
}

/// The two halves of a table's columns, which kernels take apart.
fn halves(name: &str, shape: &[usize], bytes: &[u8]) -> Vec<Target> {
    let &[rows, columns] = shape else { return Vec::new() };
    let half = columns / 2 * size_of::<f32>();
    if half == 0 {
        return Vec::new();
    }
    [("lo", 0), ("hi", half)]
        .into_iter()
        .map(|(part, from)| Target {
            name: format!("{name}.{part}"),
            kind: Kind::Half,
            dtype: Dtype::F32,
            shape: vec![rows, columns / 2],
            bytes: bytes.chunks_exact(2 * half).flat_map(|row| &row[from..from + half]).copied().collect(),
        })
        .collect()
}

/// The name of the contract that an entry's own name ends with, if it does: `out/attn_out`, `layer0.attn_out`.
pub(super) fn named<'t>(targets: &'t [Target], entry: &str) -> Option<&'t Target> {
    targets.iter().find(|target| ends_with(entry, &target.name))
}

fn ends_with(entry: &str, name: &str) -> bool {
    entry.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with(['/', '.']))
}

/// Names that an entry may be given in a map.
pub(super) fn names(targets: &[Target]) -> String {
    let mut names: Vec<&str> = targets.iter().map(|target| target.name.as_str()).collect();
    names.extend(WRITTEN.map(|(name, ..)| name));
    names.push(IGNORE);
    names.join(", ")
}
