//! Checkpoints: the weights of a whole model in a Hugging Face W8A8 directory (`docs/checkpoints.md`).
//!
//! A [`Checkpoint`] is opened whole or refused with the file, tensor or key at fault. Its shards are mapped, INT8 codes
//! and BF16 matrices are used where they lie, and only norms and scales are copied, so that a model runs layer by layer
//! in little more memory than the system's file cache. [`synthesize`](synthesize()) writes a seeded one.

mod config;
mod error;
mod fingerprint;
mod json;
mod layout;
mod shards;
mod synthesize;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use half::bf16;
use ndarray::{Array1, Array2, ArrayView1, ArrayView2};
use rayon::prelude::*;
use reference::model::Weights;
use reference::rounding::to_bf16;
use reference::{DownWeight, Geometry, LayerWeights, Rounding};
use safetensors::Dtype;

use config::Config;
pub use error::{CheckpointError, CheckpointFault};
use layout::{EMBEDDING, Expected, FINAL_NORM, HEAD, NORMS, PROJECTIONS, Part};
pub use shards::Shard;
use shards::{Place, Shards};
pub use synthesize::{Synthesis, SynthesisError, synthesize};

/// The model's configuration.
pub const CONFIG_FILE: &str = "config.json";
/// How the model is run; optional.
pub const GENERATION_FILE: &str = "generation_config.json";
/// Which shard holds which tensor.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The weights of a checkpoint without shards.
pub const SINGLE_FILE: &str = "model.safetensors";

/// An opened checkpoint, consistent in every name, type and shape.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: Config,
    shards: Shards,
    layers: Vec<Layer>,
    final_norm: Array1<f32>,
    embedding: Matrix,
    /// `None` where the head is the embedding.
    head: Option<Matrix>,
    remarks: Vec<String>,
}

/// What a checkpoint is made of, once every tensor has been checked.
struct Parts {
    layers: Vec<Layer>,
    final_norm: Array1<f32>,
    embedding: Matrix,
    head: Option<Matrix>,
    /// A head that is there though the embedding is used.
    spare_head: Option<Place>,
}

/// A layer's vectors, and where its codes lie.
#[derive(Debug)]
struct Layer {
    norms: [Array1<f32>; NORMS.len()],
    scales: [Array1<f32>; PROJECTIONS.len()],
    codes: [Place; PROJECTIONS.len()],
    /// Whether the system was asked to begin reading the codes.
    asked: AtomicBool,
}

/// Embedding or head. BF16 is used where it lies; FP32, or BF16 at an odd address, is copied when first used.
#[derive(Debug)]
struct Matrix {
    place: Place,
    copy: OnceLock<Array2<bf16>>,
}

/// A tensor as the files hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Its name.
    pub name: &'a str,
    /// Element type, under the format's name.
    pub dtype: String,
    /// Shape.
    pub shape: &'a [usize],
    /// Bytes.
    pub bytes: usize,
    /// The file that holds it.
    pub shard: &'a Path,
}

impl Checkpoint {
    /// Opens the checkpoint in `dir`. Headers, norms and scales are read; everything else is mapped.
    ///
    /// # Errors
    /// The first thing that is missing, left over or inconsistent, with its file and its tensor or key.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let metadata = std::fs::metadata(dir).map_err(|error| CheckpointError::new(dir, error))?;
        if !metadata.is_dir() {
            return Err(CheckpointError::new(dir, CheckpointFault::NotADirectory));
        }
        let config = Config::read(dir)?;
        let shards = Shards::open(dir)?;
        let parts = Parts::of(&config, &shards).map_err(|fault| {
            let shard = fault.tensor().and_then(|tensor| shards.path_of(tensor));
            CheckpointError::new(shard.unwrap_or(dir), fault)
        })?;
        let Parts { layers, final_norm, embedding, head, spare_head } = parts;
        let (dir, remarks) = (dir.to_path_buf(), Vec::new());
        let mut checkpoint = Self { dir, config, shards, layers, final_norm, embedding, head, remarks };
        checkpoint.remarks = checkpoint.remark(spare_head);
        Ok(checkpoint)
    }

    /// What is odd and yet does not keep the model from being computed.
    fn remark(&self, spare_head: Option<Place>) -> Vec<String> {
        let mut remarks = Vec::new();
        if let Some(head) = spare_head {
            let same = self.shards.bytes(&head) == self.shards.bytes(&self.embedding.place);
            remarks.push(if same {
                format!("tie_word_embeddings is true, and `{HEAD}` repeats `{EMBEDDING}`")
            } else {
                format!("tie_word_embeddings is true, but `{HEAD}` differs from `{EMBEDDING}`; the embedding is used")
            });
        }
        let total: usize = self.shards.tensors.values().map(|place| place.range.len()).sum();
        if let Some(stated) = self.shards.stated_size.filter(|&stated| stated != total as u64) {
            remarks.push(format!("the index states {stated} bytes of tensors; the shards hold {total}"));
        }
        for (matrix, name) in [(Some(&self.embedding), EMBEDDING), (self.head.as_ref(), HEAD)] {
            if let Some(matrix) = matrix.filter(|matrix| matrix.in_place(&self.shards).is_none()) {
                let Place { dtype, shape, .. } = &matrix.place;
                let why = if *dtype == Dtype::F32 { "is FP32 and is rounded to" } else { "lies at an odd address:" };
                let size = shape.iter().product::<usize>() >> 19;
                remarks.push(format!("`{name}` {why} a BF16 copy of {size} MiB when first used"));
            }
        }
        let zero = |layer: &Layer| layer.scales.iter().flatten().filter(|scale| **scale == 0.0).count();
        let zeros: usize = self.layers.iter().map(zero).sum();
        if zeros > 0 {
            remarks.push(format!("{zeros} scales are 0: these output channels are always 0"));
        }
        let vocabulary = self.config.geometry.real_vocab_size;
        for id in self.config.stop_ids.iter().filter(|id| **id >= vocabulary) {
            remarks.push(format!("stop id {id} is outside the vocabulary of {vocabulary} and can never be chosen"));
        }
        let rules = self.config.geometry.tiling_violations();
        remarks
            .extend(rules.into_iter().map(|rule| format!("the production kernels cannot run this geometry: {rule}")));
        let used = |name: &std::ffi::OsStr| self.shards.files.iter().any(|shard| shard.path.file_name() == Some(name));
        let mut unused: Vec<String> = std::fs::read_dir(&self.dir)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name())
            .filter(|name| Path::new(name).extension().is_some_and(|kind| kind == "safetensors") && !used(name))
            .map(|name| format!("`{}` is not part of the checkpoint", name.to_string_lossy()))
            .collect();
        unused.sort();
        remarks.extend(unused);
        remarks
    }

    /// Directory of the checkpoint.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Sizes of the model. The stored vocabulary is the real one.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.config.geometry
    }

    /// Base of the rotary frequencies.
    #[must_use]
    pub fn rope_theta(&self) -> f64 {
        self.config.rope_theta
    }

    /// Longest context that the model was made for, where `config.json` says it.
    #[must_use]
    pub fn max_positions(&self) -> Option<usize> {
        self.config.max_positions
    }

    /// Ids that end a generation, of `config.json` and of `generation_config.json`.
    #[must_use]
    pub fn stop_ids(&self) -> &[usize] {
        &self.config.stop_ids
    }

    /// Whether the head is the embedding.
    #[must_use]
    pub fn tied(&self) -> bool {
        self.head.is_none()
    }

    /// The files of weights.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards.files
    }

    /// Every tensor, by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.shards.tensors.iter().map(|(name, place)| TensorInfo {
            name,
            dtype: place.dtype.to_string(),
            shape: &place.shape,
            bytes: place.range.len(),
            shard: self.shards.files.get(place.shard).map_or(Path::new(""), |shard| &shard.path),
        })
    }

    /// What is odd and yet does not keep the model from being computed.
    #[must_use]
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// INT8 codes of the projections that are -128, which activations never are. Reads every code once.
    #[must_use]
    pub fn lowest_codes(&self) -> u64 {
        const CHUNK: usize = 1 << 20;
        let places: Vec<&Place> = self.layers.iter().flat_map(|layer| &layer.codes).collect();
        let lowest = |chunk: &[u8]| chunk.iter().filter(|code| **code == 0x80).count() as u64;
        places.par_iter().map(|place| self.shards.bytes(place).par_chunks(CHUNK).map(lowest).sum::<u64>()).sum()
    }

    /// The weights of a layer, counted from 0: transposed views of the files' `[out, in]`. The first use of a layer
    /// asks the system to begin reading the next.
    #[must_use]
    pub fn layer(&self, layer: usize) -> Option<LayerWeights<'_>> {
        let found = self.layers.get(layer)?;
        for ahead in self.layers.iter().skip(layer).take(2) {
            if !ahead.asked.swap(true, Ordering::Relaxed) {
                ahead.codes.iter().for_each(|place| self.shards.will_need(place));
            }
        }
        let [input_rms, post_rms, q_norm, k_norm] = &found.norms;
        let [wq, wk, wv, wo, w_gate, w_up, w_down] = &found.codes;
        let [q_scale, k_scale, v_scale, o_scale, gate_scale, up_scale, down_scale] = &found.scales;
        let codes = |place: &Place| {
            let codes = bytemuck::try_cast_slice(self.shards.bytes(place)).ok()?;
            let [out, inputs] = place.shape[..] else { return None };
            ArrayView2::from_shape((out, inputs), codes).ok().map(ArrayView2::reversed_axes)
        };
        Some(LayerWeights {
            input_rms_weight: input_rms.view(),
            post_rms_weight: post_rms.view(),
            q_norm_weight: q_norm.view(),
            k_norm_weight: k_norm.view(),
            wq: codes(wq)?,
            wk: codes(wk)?,
            wv: codes(wv)?,
            wo: codes(wo)?,
            w_gate: codes(w_gate)?,
            w_up: codes(w_up)?,
            wq_scale: q_scale.view(),
            wk_scale: k_scale.view(),
            wv_scale: v_scale.view(),
            wo_scale: o_scale.view(),
            w_gate_scale: gate_scale.view(),
            w_up_scale: up_scale.view(),
            w_down: DownWeight::Int8 { codes: codes(w_down)?, scale: down_scale.view() },
        })
    }

    /// Embedding, BF16 `[vocab, H]`. Where the file holds FP32, it is rounded (ties to even) at the first call.
    #[must_use]
    pub fn embed_tokens(&self) -> ArrayView2<'_, bf16> {
        self.embedding.view(&self.shards)
    }

    /// LM head, BF16 `[vocab, H]`: the embedding where the two are tied.
    #[must_use]
    pub fn lm_head(&self) -> ArrayView2<'_, bf16> {
        self.head.as_ref().unwrap_or(&self.embedding).view(&self.shards)
    }

    /// Gamma of the final norm, FP32 `[H]`.
    #[must_use]
    pub fn final_norm(&self) -> ArrayView1<'_, f32> {
        self.final_norm.view()
    }
}

impl Weights for Checkpoint {
    fn geometry(&self) -> &Geometry {
        self.geometry()
    }

    fn layer(&self, layer: usize) -> Option<LayerWeights<'_>> {
        self.layer(layer)
    }

    fn embed_tokens(&self) -> ArrayView2<'_, bf16> {
        self.embed_tokens()
    }

    fn final_norm(&self) -> ArrayView1<'_, f32> {
        self.final_norm()
    }

    fn lm_head(&self) -> ArrayView2<'_, bf16> {
        self.lm_head()
    }
}

impl Parts {
    fn of(config: &Config, shards: &Shards) -> Result<Self, CheckpointFault> {
        let (geometry, tied) = (&config.geometry, config.tied);
        let layers = 0..geometry.num_hidden_layers;
        let mut known = BTreeSet::new();
        let of_layers = layers.clone().flat_map(|layer| layout::of_layer(geometry, layer));
        for expected in layout::outside(geometry, tied).into_iter().chain(of_layers) {
            check(shards, &expected)?;
            known.insert(expected.name);
        }
        let spare_head = shards.tensors.get(HEAD).filter(|_| tied).cloned();
        known.extend(spare_head.iter().map(|_| HEAD.to_owned()));
        if let Some(name) = shards.tensors.keys().find(|name| !known.contains(*name)) {
            return Err(unexpected(name, shards, geometry));
        }
        Ok(Self {
            layers: layers.map(|layer| Layer::read(shards, layer)).collect::<Result<_, _>>()?,
            final_norm: vector(shards, FINAL_NORM, finite)?,
            embedding: Matrix::at(place(shards, EMBEDDING)?),
            head: if tied { None } else { Some(Matrix::at(place(shards, HEAD)?)) },
            spare_head,
        })
    }
}

impl Layer {
    fn read(shards: &Shards, layer: usize) -> Result<Self, CheckpointFault> {
        let scale = |module| vector(shards, &layout::name(layer, module, "weight_scale"), scale_value);
        let codes = |module| place(shards, &layout::name(layer, module, "weight"));
        Ok(Self {
            norms: each(NORMS, |module| vector(shards, &layout::name(layer, module, "weight"), finite))?,
            scales: each(PROJECTIONS, scale)?,
            codes: each(PROJECTIONS, codes)?,
            asked: AtomicBool::new(false),
        })
    }
}

/// `make` of each of a fixed number of names.
fn each<T, const N: usize>(
    names: [&'static str; N],
    make: impl Fn(&'static str) -> Result<T, CheckpointFault>,
) -> Result<[T; N], CheckpointFault> {
    let made: Vec<T> = names.into_iter().map(&make).collect::<Result<_, _>>()?;
    // One for each name, so that it always fits.
    made.try_into().map_err(|_| CheckpointFault::NoWeights)
}

impl Matrix {
    fn at(place: Place) -> Self {
        Self { place, copy: OnceLock::new() }
    }

    fn shape(&self) -> (usize, usize) {
        match self.place.shape[..] {
            [rows, columns] => (rows, columns),
            _ => (0, 0),
        }
    }

    /// The matrix where it lies; `None` where it has to be copied.
    fn in_place<'a>(&self, shards: &'a Shards) -> Option<ArrayView2<'a, bf16>> {
        let bytes = if self.place.dtype == Dtype::BF16 { shards.bytes(&self.place) } else { return None };
        ArrayView2::from_shape(self.shape(), bytemuck::try_cast_slice(bytes).ok()?).ok()
    }

    fn view<'a>(&'a self, shards: &'a Shards) -> ArrayView2<'a, bf16> {
        self.in_place(shards).unwrap_or_else(|| self.copy.get_or_init(|| self.narrowed(shards)).view())
    }

    fn narrowed(&self, shards: &Shards) -> Array2<bf16> {
        const CHUNK: usize = 1 << 16;
        let bytes = shards.bytes(&self.place);
        let mut values = vec![bf16::ZERO; self.place.shape.iter().product()];
        let size = bytes.len() / values.len().max(1);
        values.par_chunks_mut(CHUNK).zip(bytes.par_chunks(CHUNK * size)).for_each(|(values, bytes)| match size {
            4 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = to_bf16(f32::from_le_bytes(*bytes), Rounding::Rne);
                }
            }
            _ => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = bf16::from_le_bytes(*bytes);
                }
            }
        });
        Array2::from_shape_vec(self.shape(), values).unwrap_or_default()
    }
}

/// Where a tensor lies that [`check`] has seen.
fn place(shards: &Shards, name: &str) -> Result<Place, CheckpointFault> {
    let missing = || CheckpointFault::Missing { tensor: name.to_owned(), searched: shards.searched() };
    shards.tensors.get(name).cloned().ok_or_else(missing)
}

/// Checks presence, type and shape of a tensor.
fn check(shards: &Shards, expected: &Expected) -> Result<(), CheckpointFault> {
    let name = &expected.name;
    let weight = || name.trim_end_matches("_scale").to_owned();
    let Some(found) = shards.tensors.get(name) else {
        let (tensor, searched) = (name.clone(), shards.searched());
        return Err(match expected.part {
            Part::Scale => match shards.tensors.get(&weight()) {
                // It has no scale because it has no codes.
                Some(found) if found.dtype != Dtype::I8 => wrong_type(&weight(), found, Part::Codes),
                Some(_) => CheckpointFault::MissingScale { tensor, weight: weight(), searched },
                None => CheckpointFault::Missing { tensor: weight(), searched },
            },
            _ => CheckpointFault::Missing { tensor, searched },
        });
    };
    // A scale beside a weight that has no codes is named before anything else is said of the weight.
    if expected.part == Part::Scale
        && let Some(weight_found) = shards.tensors.get(&weight()).filter(|weight| weight.dtype != Dtype::I8)
    {
        let found = weight_found.dtype.to_string();
        return Err(CheckpointFault::NeedlessScale { tensor: name.clone(), weight: weight(), found });
    }
    let fits = match expected.part {
        Part::Codes => found.dtype == Dtype::I8,
        Part::Scale | Part::Norm | Part::Matrix => matches!(found.dtype, Dtype::BF16 | Dtype::F32),
    };
    if !fits {
        return Err(wrong_type(name, found, expected.part));
    }
    if found.shape != expected.shape {
        let (found, expected) = (found.shape.clone(), expected.shape.clone());
        return Err(CheckpointFault::Shape { tensor: name.clone(), found, expected });
    }
    Ok(())
}

fn wrong_type(name: &str, found: &Place, part: Part) -> CheckpointFault {
    let expected = match part {
        Part::Codes => "config.json declares it INT8 (I8)",
        Part::Scale => "a scale is BF16 or F32",
        Part::Norm => "a norm is BF16 or F32",
        Part::Matrix => "embedding and head are BF16 or F32",
    };
    CheckpointFault::DType { tensor: name.to_owned(), found: found.dtype.to_string(), expected }
}

/// Why a tensor is left over.
fn unexpected(name: &str, shards: &Shards, geometry: &Geometry) -> CheckpointFault {
    if let Some(weight) = name.strip_suffix("_scale")
        && let Some(found) = shards.tensors.get(weight).filter(|found| found.dtype != Dtype::I8)
    {
        let (tensor, weight, found) = (name.to_owned(), weight.to_owned(), found.dtype.to_string());
        return CheckpointFault::NeedlessScale { tensor, weight, found };
    }
    let layers = geometry.num_hidden_layers;
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    let why = if layer.is_some_and(|layer| layer >= layers) {
        format!("config.json declares {layers} layers")
    } else if name.ends_with("zero_point") || name.ends_with("weight_offset") {
        "config.json declares a symmetric scheme, which has none".to_owned()
    } else if name.ends_with(".bias") {
        "config.json declares no bias".to_owned()
    } else {
        "a Qwen3 W8A8 checkpoint has no tensor of that name".to_owned()
    };
    CheckpointFault::Unexpected { tensor: name.to_owned(), why }
}

/// A vector's values, widened.
fn vector(
    shards: &Shards,
    name: &str,
    allowed: impl Fn(f32) -> Result<(), &'static str>,
) -> Result<Array1<f32>, CheckpointFault> {
    let place = place(shards, name)?;
    let bytes = shards.bytes(&place);
    let values: Array1<f32> = match place.dtype {
        Dtype::BF16 => bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
        _ => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
    };
    for (index, &value) in values.iter().enumerate() {
        allowed(value).map_err(|rule| CheckpointFault::Value { tensor: name.to_owned(), index, value, rule })?;
    }
    Ok(values)
}

fn finite(value: f32) -> Result<(), &'static str> {
    if value.is_finite() { Ok(()) } else { Err("a norm's weights are finite") }
}

fn scale_value(value: f32) -> Result<(), &'static str> {
    if value.is_finite() && value >= 0.0 { Ok(()) } else { Err("a scale is finite and not negative") }
}
