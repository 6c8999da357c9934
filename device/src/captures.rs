//! What a device produced, as the contract types it: `captures.safetensors` read and checked.
//!
//! `docs/bundles.md` draws the line that this module keeps. An unknown name, a wrong shape, rows without
//! values, a count that is not a number: the file is malformed and nothing of it is used. An element type
//! other than the contract's is a finding about that tensor, so it is handed on as [`Captured::WrongDType`].
//! Values and row ids are never looked at. Names and shapes are checked before any data is read, so that
//! memory follows the case and not the file's claims.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use cases::header::{Entry, Header, HeaderError};
use half::bf16;
use ndarray::{Array, Array1, Array2, Array3, ArrayView2, Axis, Dimension, Ix1, Ix2, Ix3};
use reference::{Geometry, Tensor, TensorId};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use thiserror::Error;

/// Keys of the optional work counts in the file's `__metadata__`, decimal.
pub(crate) const WORK_COUNTS: [&str; 2] = ["attention_work_items", "online_softmax_work_items"];

/// Caches as a whole, each with the written rows that may stand in its place.
const WHOLE: [[&str; 2]; 2] = [["k_cache", "k_written_rows"], ["v_cache", "v_written_rows"]];

/// A captured value, or the element type that stood in its place.
#[derive(Clone, Debug, PartialEq)]
pub enum Captured<T> {
    /// Values of the contract's type.
    Values(T),
    /// The file has another element type than the contract: a failure of this tensor, never a conversion.
    WrongDType {
        /// The type found, under the contract's name where it has one (`FP32`, `INT8`, ...).
        found: String,
        /// The shape found.
        shape: Vec<usize>,
    },
}

impl<T> Captured<T> {
    /// The values, when they have the contract's type.
    #[must_use]
    pub fn values(&self) -> Option<&T> {
        match self {
            Self::Values(values) => Some(values),
            Self::WrongDType { .. } => None,
        }
    }

    fn map<U>(self, change: impl FnOnce(T) -> U) -> Captured<U> {
        match self {
            Self::Values(values) => Captured::Values(change(values)),
            Self::WrongDType { found, shape } => Captured::WrongDType { found, shape },
        }
    }
}

/// A captured tensor of a decode layer; its shape is [`TensorId::shape`].
pub type CapturedTensor = Captured<Tensor>;

/// The cache rows whose bytes changed, as the capture lists them: in any order, in or out of range.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenRows {
    /// Cache rows, INT64 `[n]`. Over several layers, layer `l` begins at row `l * pages * KV * 128`.
    pub rows: Captured<Array1<i64>>,
    /// Their new contents, BF16 `[n, D]`.
    pub values: Captured<Array2<bf16>>,
}

/// What a `tokens` run captures beside its caches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenCaptures {
    /// Generated ids, INT64 `[rows, 1 + decode_steps]`.
    pub token_ids: Option<Captured<Array2<i64>>>,
    /// The two best ids of the real vocabulary, INT64 `[rows, 1 + decode_steps, 2]`.
    pub top2_ids: Option<Captured<Array3<i64>>>,
    /// Their logits, FP32 `[rows, 1 + decode_steps, 2]`.
    pub top2_logits: Option<Captured<Array3<f32>>>,
    /// Hidden states after the last layer of prefill, BF16 `[all prompt tokens, H]`.
    pub prefill_hidden: Option<Captured<Array2<bf16>>>,
    /// Hidden states after the last layer of each decode step, BF16 `[decode_steps, rows, H]`.
    pub decode_hidden: Option<Captured<Array3<bf16>>>,
}

/// The device's outputs and intermediates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Captures {
    /// Tensors of a decode layer; what the device did not give is absent. Cache rows are below.
    pub tensors: BTreeMap<TensorId, CapturedTensor>,
    /// Key rows written.
    pub k_written: Option<WrittenRows>,
    /// Value rows written.
    pub v_written: Option<WrittenRows>,
    /// Outputs of a `tokens` run.
    pub tokens: TokenCaptures,
    /// The file's free-form metadata, work counts included.
    pub metadata: BTreeMap<String, String>,
}

/// What a capture may hold: which kernel ran, and the sizes that its case fixes beside the geometry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// One decode layer.
    DecodeLayer {
        /// Rows of each cache, `pages * KV * 128`.
        cache_rows: usize,
    },
    /// Prompts, then decode steps through all layers.
    Tokens {
        /// Active rows.
        rows: usize,
        /// Decode steps after the first token.
        decode_steps: usize,
        /// Tokens of all prompts.
        prompt_tokens: usize,
        /// Rows of each cache over all layers, `layers * pages * KV * 128`.
        cache_rows: usize,
    },
}

/// A capture that cannot be used.
#[derive(Debug, Error)]
#[error("{}: {fault}", path.display())]
pub struct CaptureError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub fault: Box<CaptureFault>,
}

/// What is wrong with a capture.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum CaptureFault {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("is not a regular file")]
    NotAFile,
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("is not a valid safetensors file: {0}")]
    Format(#[from] SafeTensorError),
    #[error("unknown tensor `{tensor}`; a {kernel} capture may hold {known}")]
    Unknown { tensor: String, kernel: &'static str, known: String },
    #[error("tensor `{tensor}` has shape {found:?}; expected {expected}")]
    Shape { tensor: String, found: Vec<usize>, expected: String },
    #[error("has `{present}` without `{missing}`; written cache rows come as row ids and values together")]
    Unpaired { present: &'static str, missing: &'static str },
    #[error("has `{whole}` and `{rows}`; a cache is given whole or by the rows that were written, not both")]
    Both { whole: &'static str, rows: &'static str },
    #[error("`{name}_rows` lists {rows} rows, but `{name}_values` holds {values}")]
    RowCount { name: &'static str, rows: usize, values: usize },
    #[error("metadata `{key}` is {value:?}; expected a decimal count")]
    Count { key: &'static str, value: String },
    #[error("`{tensor}` has the wrong element type ({found}) and holds no values that could be written")]
    Unwritable { tensor: String, found: String },
    #[error(
        "unknown tensor `{tensor}`; layer states are named `layer_hidden.LAYER.STEP`, `layer_hidden.LAYER.prefill`, or \
         `layer_hidden.LAYER` for all decode steps"
    )]
    UnknownState { tensor: String },
    #[error("tensor `{tensor}` is of layer {layer}, but the run has layers 0 to {}", layers.saturating_sub(1))]
    StateLayer { tensor: String, layer: usize, layers: usize },
    #[error("tensor `{tensor}` is of decode step {step}, but the run has {steps}, counted from 0")]
    StateStep { tensor: String, step: usize, steps: usize },
    #[error("tensor `{tensor}` has element type {found}, expected BF16; states are never converted")]
    StateType { tensor: String, found: String },
    #[error("tensor `{tensor}` holds `{state}`, which {other} holds too; leave one of them out")]
    StateTwice { tensor: String, state: String, other: String },
    #[error("holds {found} files named *.safetensors; a directory of layer states has 1 to {most}")]
    StateFiles { found: usize, most: usize },
}

impl Captures {
    /// Reads a capture of this geometry and layout.
    ///
    /// # Errors
    /// The file cannot be read, is no valid safetensors file, or does not fit the table of
    /// `docs/bundles.md`; the message names the tensor, what was found and what was expected.
    pub fn open(path: &Path, geometry: &Geometry, layout: &Layout) -> Result<Self, CaptureError> {
        read(path, geometry, layout, None)
            .map_err(|fault| CaptureError { path: path.to_path_buf(), fault: Box::new(fault) })
    }

    /// The same where the caches may be given whole too, as `k_cache` and `v_cache`: the rows that were written are those
    /// whose bytes differ from `before`, keys and values before the run.
    ///
    /// # Errors
    /// As above; or a cache is given whole and by its written rows.
    pub fn open_with_caches(
        path: &Path,
        geometry: &Geometry,
        layout: &Layout,
        before: [ArrayView2<'_, bf16>; 2],
    ) -> Result<Self, CaptureError> {
        read(path, geometry, layout, Some(before))
            .map_err(|fault| CaptureError { path: path.to_path_buf(), fault: Box::new(fault) })
    }

    /// Attention work items that the run counted, if it did.
    #[must_use]
    pub fn attention_work_items(&self) -> Option<u64> {
        count(self.metadata.get(WORK_COUNTS[0])?)
    }

    /// Online-softmax work items that the run counted, if it did.
    #[must_use]
    pub fn online_softmax_work_items(&self) -> Option<u64> {
        count(self.metadata.get(WORK_COUNTS[1])?)
    }

    /// Whether the file holds no tensor at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
            && self.k_written.is_none()
            && self.v_written.is_none()
            && self.tokens == TokenCaptures::default()
    }
}

impl Layout {
    fn kernel(&self) -> &'static str {
        match self {
            Self::DecodeLayer { .. } => "decode_layer",
            Self::Tokens { .. } => "tokens",
        }
    }

    fn cache_rows(&self) -> usize {
        match *self {
            Self::DecodeLayer { cache_rows } | Self::Tokens { cache_rows, .. } => cache_rows,
        }
    }

    /// Every tensor that a capture may hold, with its shape.
    fn table(&self, geometry: &Geometry) -> BTreeMap<&'static str, Vec<Size>> {
        use Size::{AtMost, Is};
        let mut table = BTreeMap::new();
        match *self {
            Self::DecodeLayer { .. } => {
                for id in TensorId::ALL {
                    if TensorId::from_capture_name(id.name()).is_some() {
                        table.insert(id.name(), id.shape(geometry).map(Is).to_vec());
                    }
                }
            }
            Self::Tokens { rows, decode_steps, prompt_tokens, .. } => {
                let (tokens, hidden) = (1 + decode_steps, geometry.hidden_size);
                table.insert("token_ids", vec![Is(rows), Is(tokens)]);
                table.insert("top2_ids", vec![Is(rows), Is(tokens), Is(2)]);
                table.insert("top2_logits", vec![Is(rows), Is(tokens), Is(2)]);
                table.insert("prefill_hidden", vec![Is(prompt_tokens), Is(hidden)]);
                table.insert("decode_hidden", vec![Is(decode_steps), Is(rows), Is(hidden)]);
            }
        }
        let cache_rows = self.cache_rows();
        for [rows, values] in [["k_written_rows", "k_written_values"], ["v_written_rows", "v_written_values"]] {
            table.insert(rows, vec![AtMost(cache_rows)]);
            table.insert(values, vec![AtMost(cache_rows), Is(geometry.head_dim)]);
        }
        table
    }
}

/// One dimension of an expected shape.
#[derive(Clone, Copy)]
enum Size {
    Is(usize),
    AtMost(usize),
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Is(size) => write!(f, "{size}"),
            Self::AtMost(size) => write!(f, "0..={size}"),
        }
    }
}

fn fits(found: &[usize], expected: &[Size]) -> bool {
    // A column vector may come as a plain vector: only per-row scalars are one column wide.
    let expected = match expected {
        [rows, Size::Is(1)] if found.len() == 1 => std::slice::from_ref(rows),
        _ => expected,
    };
    found.len() == expected.len()
        && found.iter().zip(expected).all(|(&found, expected)| match *expected {
            Size::Is(size) => found == size,
            Size::AtMost(size) => found <= size,
        })
}

fn read(
    path: &Path,
    geometry: &Geometry,
    layout: &Layout,
    before: Option<[ArrayView2<'_, bf16>; 2]>,
) -> Result<Captures, CaptureFault> {
    // Asked before opening: opening a pipe waits for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(CaptureFault::NotAFile);
    }
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let header = Header::read(&mut file, length)?;
    check(&header, geometry, layout, before.is_some())?;

    file.seek(SeekFrom::Start(0))?;
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes)?;
    let source = Source(SafeTensors::deserialize(&bytes)?);

    let mut tensors = BTreeMap::new();
    if matches!(layout, Layout::DecodeLayer { .. }) {
        for name in header.tensors.keys() {
            if let Some(id) = TensorId::from_capture_name(name) {
                tensors.insert(id, source.tensor(id, geometry)?);
            }
        }
    }
    let tokens = TokenCaptures {
        token_ids: source.array::<_, Ix2>("token_ids")?,
        top2_ids: source.array::<_, Ix3>("top2_ids")?,
        top2_logits: source.array::<_, Ix3>("top2_logits")?,
        prefill_hidden: source.array::<_, Ix2>("prefill_hidden")?,
        decode_hidden: source.array::<_, Ix3>("decode_hidden")?,
    };
    let mut k_written = source.written("k_written_rows", "k_written_values")?;
    let mut v_written = source.written("v_written_rows", "v_written_values")?;
    if let Some([k, v]) = before {
        k_written = k_written.or(source.changed("k_cache", k)?);
        v_written = v_written.or(source.changed("v_cache", v)?);
    }
    Ok(Captures { tensors, k_written, v_written, tokens, metadata: header.metadata })
}

/// Checks names, shapes and counts against the table of `docs/bundles.md`.
fn check(header: &Header, geometry: &Geometry, layout: &Layout, caches: bool) -> Result<(), CaptureFault> {
    let mut table = layout.table(geometry);
    if caches {
        for [whole, rows] in WHOLE {
            table.insert(whole, vec![Size::Is(layout.cache_rows()), Size::Is(geometry.head_dim)]);
            if header.tensors.contains_key(whole) && header.tensors.contains_key(rows) {
                return Err(CaptureFault::Both { whole, rows });
            }
        }
    }
    for (name, entry) in &header.tensors {
        let Some(expected) = table.get(name.as_str()) else {
            let known = table.keys().copied().collect::<Vec<_>>().join(", ");
            return Err(CaptureFault::Unknown { tensor: name.clone(), kernel: layout.kernel(), known });
        };
        if !fits(&entry.shape, expected) {
            let sizes = expected.iter().map(Size::to_string).collect::<Vec<_>>().join(", ");
            let (tensor, found) = (name.clone(), entry.shape.clone());
            return Err(CaptureFault::Shape { tensor, found, expected: format!("[{sizes}]") });
        }
    }
    let length = |name: &str| header.tensors.get(name).map(|entry: &Entry| entry.shape.first().copied().unwrap_or(0));
    for [name, rows, values] in
        [["k_written", "k_written_rows", "k_written_values"], ["v_written", "v_written_rows", "v_written_values"]]
    {
        match (length(rows), length(values)) {
            (Some(_), None) => return Err(CaptureFault::Unpaired { present: rows, missing: values }),
            (None, Some(_)) => return Err(CaptureFault::Unpaired { present: values, missing: rows }),
            (Some(rows), Some(values)) if rows != values => {
                return Err(CaptureFault::RowCount { name, rows, values });
            }
            _ => {}
        }
    }
    for key in WORK_COUNTS {
        if let Some(value) = header.metadata.get(key)
            && count(value).is_none()
        {
            return Err(CaptureFault::Count { key, value: value.clone() });
        }
    }
    Ok(())
}

/// A decimal count; no sign, no spaces.
fn count(text: &str) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// An element that captures hold, in the file's little-endian bytes.
pub(crate) trait Element: Sized + Copy {
    const DTYPE: Dtype;
    fn decode(bytes: &[u8]) -> Vec<Self>;
    fn encode(self, bytes: &mut Vec<u8>);
}

macro_rules! element {
    ($($type:ty, $size:literal, $dtype:ident;)*) => {$(
        impl Element for $type {
            const DTYPE: Dtype = Dtype::$dtype;
            fn decode(bytes: &[u8]) -> Vec<Self> {
                bytes.as_chunks::<$size>().0.iter().map(|&chunk| Self::from_le_bytes(chunk)).collect()
            }
            fn encode(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }
        }
    )*};
}
element!(bf16, 2, BF16; f32, 4, F32; i8, 1, I8; i64, 8, I64;);

/// The contract's name of an element type, or the format's where the contract has none.
pub(crate) fn type_name(dtype: Dtype) -> String {
    match dtype {
        Dtype::F32 => "FP32".into(),
        Dtype::I8 => "INT8".into(),
        Dtype::I32 => "INT32".into(),
        Dtype::I64 => "INT64".into(),
        other => other.to_string(),
    }
}

/// A file whose names and shapes have been checked.
struct Source<'a>(SafeTensors<'a>);

impl Source<'_> {
    fn view(&self, name: &str) -> Option<TensorView<'_>> {
        self.0.tensor(name).ok()
    }

    fn array<T: Element, D: Dimension>(&self, name: &str) -> Result<Option<Captured<Array<T, D>>>, CaptureFault> {
        self.view(name).map(|view| typed(name, &view, view.shape())).transpose()
    }

    fn tensor(&self, id: TensorId, geometry: &Geometry) -> Result<CapturedTensor, CaptureFault> {
        let (name, shape) = (id.name(), id.shape(geometry));
        let view = self.0.tensor(name)?;
        Ok(match id.dtype() {
            reference::DType::Bf16 => typed::<bf16, Ix2>(name, &view, &shape)?.map(Tensor::Bf16),
            reference::DType::I8 => typed::<i8, Ix2>(name, &view, &shape)?.map(Tensor::I8),
            // No intermediate of a decode layer has an integer type wider than a byte.
            _ => typed::<f32, Ix2>(name, &view, &shape)?.map(Tensor::F32),
        })
    }

    fn written(&self, rows: &str, values: &str) -> Result<Option<WrittenRows>, CaptureFault> {
        let rows = self.array::<_, Ix1>(rows)?;
        let values = self.array::<_, Ix2>(values)?;
        Ok(rows.zip(values).map(|(rows, values)| WrittenRows { rows, values }))
    }

    /// The rows of a whole cache whose bytes are not those of before.
    fn changed(&self, name: &str, before: ArrayView2<'_, bf16>) -> Result<Option<WrittenRows>, CaptureFault> {
        let Some(after) = self.array::<bf16, Ix2>(name)? else { return Ok(None) };
        Ok(Some(match after {
            Captured::Values(after) => WrittenRows::between(before, after.view()),
            Captured::WrongDType { found, shape } => WrittenRows {
                rows: Captured::Values(Array1::default(0)),
                values: Captured::WrongDType { found, shape },
            },
        }))
    }
}

impl WrittenRows {
    /// The rows in which two caches of one shape differ, and what the later one holds there. Bits are compared: NaN differs
    /// from another NaN, and -0 from 0.
    #[must_use]
    pub fn between(before: ArrayView2<'_, bf16>, after: ArrayView2<'_, bf16>) -> Self {
        let differs = |row: usize| {
            let pairs = before.row(row).into_iter().zip(after.row(row));
            pairs.into_iter().any(|(before, after)| before.to_bits() != after.to_bits())
        };
        let rows: Vec<usize> = (0..after.nrows().min(before.nrows())).filter(|&row| differs(row)).collect();
        Self {
            values: Captured::Values(after.select(Axis(0), &rows)),
            rows: Captured::Values(rows.iter().map(|&row| row as i64).collect()),
        }
    }
}

fn typed<T: Element, D: Dimension>(
    name: &str,
    view: &TensorView<'_>,
    shape: &[usize],
) -> Result<Captured<Array<T, D>>, CaptureFault> {
    if view.dtype() != T::DTYPE {
        return Ok(Captured::WrongDType { found: type_name(view.dtype()), shape: view.shape().to_vec() });
    }
    Array::from_shape_vec(shape, T::decode(view.data()))
        .and_then(Array::into_dimensionality::<D>)
        .map(Captured::Values)
        .map_err(|_| CaptureFault::Shape {
            tensor: name.into(),
            found: view.shape().to_vec(),
            expected: format!("{shape:?}"),
        })
}
