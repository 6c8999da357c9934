//! What a runner gets and gives: the inputs of a case in one safetensors file under the kernel's own names, and its
//! outputs read back. A runner is any command that runs a kernel; `docs/commands.md` is its protocol.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use cases::header::{Entry, Header};
use cases::{Case, Input, InputError, Inputs, Kernel, create_atomically_with};
use reference::{DType, PAGE, Tensor};
use safetensors::Dtype;

use crate::bundle::CAPTURES_FILE;
use crate::captures::{CaptureError, CaptureFault, Captures, Element as _, Layout};

/// Name of the file with a case's inputs.
pub const INPUTS_FILE: &str = "inputs.safetensors";

/// One tensor that a kernel reads, as its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputTensor<'a> {
    /// The kernel's name of it.
    pub name: &'static str,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Its elements, row-major, little-endian.
    pub bytes: Cow<'a, [u8]>,
}

impl InputTensor<'_> {
    fn int32(name: &'static str, values: impl IntoIterator<Item = i32>) -> Self {
        let bytes: Vec<u8> = values.into_iter().flat_map(i32::to_le_bytes).collect();
        Self { name, dtype: Dtype::I32, shape: vec![bytes.len() / 4], bytes: Cow::Owned(bytes) }
    }
}

/// The element type of a file for one of the contract's.
#[must_use]
pub fn file_type(dtype: DType) -> Dtype {
    match dtype {
        DType::Bf16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::I8 => Dtype::I8,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
    }
}

/// A tensor's elements, row-major, little-endian.
#[must_use]
pub fn tensor_bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(tensor.shape().iter().product::<usize>() * tensor.dtype().size());
    match tensor {
        Tensor::Bf16(values) => values.iter().for_each(|value| value.encode(&mut bytes)),
        Tensor::F32(values) => values.iter().for_each(|value| value.encode(&mut bytes)),
        Tensor::I8(values) => values.iter().for_each(|value| value.encode(&mut bytes)),
    }
    bytes
}

/// Everything that the case's kernel reads, caches before the run and batch metadata included, under the names and in
/// the layout of `docs/numerics.md`, Tensors. A token run has besides `prompt_ids` (INT32, prompts one after the
/// other), `prompt_lens` (INT32 `[rows]`) and `decode_steps` (INT32 `[1]`), and no `seq_lens` and `slot_mapping`.
#[must_use]
pub fn input_tensors<'a>(case: &Case, inputs: &'a Inputs) -> Vec<InputTensor<'a>> {
    let mut tensors: Vec<InputTensor<'a>> = case
        .inputs()
        .filter_map(|input| {
            let (dtype, shape) = (file_type(input.dtype()), input.shape(&case.geometry, case.extent()).to_vec());
            Some(InputTensor { name: input.name(), dtype, shape, bytes: Cow::Borrowed(inputs.bytes(input)?) })
        })
        .collect();
    // Sizes are bounded by the rules of case files, far below 2^31.
    let int = |value: usize| value as i32;
    let table = |rows: &[Vec<i32>]| InputTensor::int32("block_table", rows.iter().flatten().copied());
    tensors.push(InputTensor::int32("active_batch", [int(case.active_batch)]));
    match &case.kernel {
        Kernel::DecodeLayer(decode) => {
            let batch = &decode.batch;
            tensors.push(table(&batch.block_table));
            tensors.push(InputTensor::int32("seq_lens", batch.seq_lens.map(int)));
            tensors.push(InputTensor::int32("slot_mapping", batch.slots.map(int)));
        }
        Kernel::Tokens(tokens) => {
            tensors.push(table(&tokens.block_table));
            tensors.push(InputTensor::int32("prompt_ids", tokens.prompts.iter().flatten().copied().map(int)));
            tensors.push(InputTensor::int32("prompt_lens", tokens.prompts.iter().map(Vec::len).map(int)));
            tensors.push(InputTensor::int32("decode_steps", [int(tokens.decode_steps)]));
        }
    }
    tensors
}

/// Writes the inputs of a case as a new safetensors file. Its metadata say what is no tensor: kernel, sizes,
/// `rms_norm_eps`.
///
/// # Errors
/// Whatever the file system says.
pub fn write_inputs(path: &Path, case: &Case, inputs: &Inputs) -> io::Result<()> {
    let mut tensors = input_tensors(case, inputs);
    // From the widest type to the narrowest, so that each tensor is aligned to its elements.
    tensors.sort_by(|a, b| b.dtype.bitsize().cmp(&a.dtype.bitsize()).then_with(|| a.name.cmp(b.name)));
    let mut header = Header { metadata: metadata(case), ..Header::default() };
    let mut end = 0;
    for tensor in &tensors {
        let begin = end;
        end += tensor.bytes.len();
        let entry = Entry { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (begin, end) };
        header.tensors.insert(tensor.name.to_owned(), entry);
    }
    let head = header.encode().map_err(io::Error::other)?;
    create_atomically_with(path, |file| {
        file.write_all(&head)?;
        tensors.iter().try_for_each(|tensor| file.write_all(&tensor.bytes))
    })
}

fn metadata(case: &Case) -> BTreeMap<String, String> {
    let g = &case.geometry;
    [
        ("format", "1".to_owned()),
        ("case", case.name.clone()),
        ("kernel", case.kernel.kind().name().to_owned()),
        ("layers", case.layers.to_string()),
        ("pages", case.pages.to_string()),
        ("page_size", PAGE.to_string()),
        ("max_seq", case.max_seq.to_string()),
        ("hidden_size", g.hidden_size.to_string()),
        ("num_attention_heads", g.num_attention_heads.to_string()),
        ("num_key_value_heads", g.num_key_value_heads.to_string()),
        ("head_dim", g.head_dim.to_string()),
        ("intermediate_size", g.intermediate_size.to_string()),
        ("vocab_size", g.vocab_size.to_string()),
        ("real_vocab_size", g.real_vocab_size.to_string()),
        ("rms_norm_eps", format!("{:e}", g.rms_norm_eps)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}

/// Outputs that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum OutputsError {
    /// The file is malformed.
    #[error(transparent)]
    Captures(#[from] CaptureError),
    /// The inputs lack the caches: a fault of the caller.
    #[error(transparent)]
    Inputs(#[from] InputError),
}

/// Reads what a runner left at `path`: a file in the layout of `captures.safetensors`, or a directory that holds one
/// under that name. Besides, it may hold the whole caches after the run, `k_cache` and `v_cache`. `None` when no file
/// is there, or no tensor in it.
///
/// # Errors
/// What is there is malformed.
pub fn read_outputs(path: &Path, case: &Case, inputs: &Inputs) -> Result<Option<Captures>, OutputsError> {
    let Some(file) = outputs_file(path) else { return Ok(None) };
    let before = [inputs.bf16(Input::KCache)?, inputs.bf16(Input::VCache)?];
    let captures = Captures::open_with_caches(&file, &case.geometry, &Layout::of(case), before)?;
    Ok((!captures.is_empty()).then_some(captures))
}

/// Where a runner that was given `path` left its outputs, if it did.
#[must_use]
pub fn outputs_file(path: &Path) -> Option<PathBuf> {
    let file = if path.is_dir() { path.join(CAPTURES_FILE) } else { path.to_path_buf() };
    // A link to nowhere is there, and opening it says what is wrong with it.
    file.symlink_metadata().is_ok().then_some(file)
}

impl OutputsError {
    /// What is wrong with the file, without its name.
    #[must_use]
    pub fn fault(&self) -> Option<&CaptureFault> {
        match self {
            Self::Captures(error) => Some(&error.fault),
            Self::Inputs(_) => None,
        }
    }
}

#[cfg(test)]
mod tests;
