//! Checkpoints: the weights of a whole model in a W8A8 directory, of Hugging Face's layout or of the Ascend
//! compressor's (`docs/checkpoints.md`).
//!
//! A [`Checkpoint`] is opened whole or refused with the file, tensor or key at fault. Its shards are mapped, INT8 codes
//! and BF16 matrices are used where they lie, and only norms and scales are copied, so that a model runs layer by layer
//! in little more memory than the system's file cache. [`synthesize`](synthesize()) writes a seeded one,
//! [`quantize`](quantize()) makes one of a BF16 checkpoint, and a [`Fingerprint`] says which model one is.

mod ascend;
mod config;
mod error;
mod fingerprint;
mod json;
mod layout;
mod matrix;
mod quantize;
mod rule;
mod shards;
mod staging;
mod synthesize;
mod tensors;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use half::bf16;
use ndarray::{Array1, ArrayView1, ArrayView2};
use rayon::prelude::*;
use reference::model::Weights;
use reference::{DownWeight, Geometry, LayerWeights};
use safetensors::Dtype;

use ascend::Description;
pub use ascend::{DESCRIPTION_FILE, INDEX_FILE as ASCEND_INDEX_FILE, SINGLE_FILE as ASCEND_SINGLE_FILE};
use config::Config;
pub use config::StopId;
pub use error::{CheckpointError, CheckpointFault};
pub use fingerprint::{Fingerprint, Named, fingerprint};
pub use layout::Form;
use layout::{EMBEDDING, FINAL_NORM, HEAD, NORMS, PROJECTIONS};
use matrix::Matrix;
pub use quantize::{Quantization, QuantizeError, quantize};
pub use rule::Rule;
pub use shards::Shard;
use shards::{Place, Shards};
pub use staging::WriteError;
pub use synthesize::{Synthesis, SynthesisError, synthesize};
use tensors::{finite, offset_value, place, scale_value, vector};

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
    form: Form,
    config: Config,
    shards: Shards,
    layers: Vec<Layer>,
    final_norm: Array1<f32>,
    embedding: Matrix,
    /// `None` where the head is the embedding.
    head: Option<Matrix>,
    head_source: HeadSource,
    remarks: Vec<String>,
}

/// Where the LM head comes from, by the tie flag and by what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadSource {
    /// A tensor of its own; `tie_word_embeddings` is false.
    Own,
    /// The embedding; there is no other.
    Tied,
    /// The embedding, though `lm_head.weight` is there and repeats it.
    TiedRepeated,
    /// The embedding, though `lm_head.weight` is there and differs from it: the tensor is not used.
    TiedOverridden,
}

/// A group of tensors that are stored as one type and used as another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversion {
    /// Which tensors.
    pub tensors: &'static str,
    /// Type in the files.
    pub from: String,
    /// Type that is computed with.
    pub to: String,
    /// How one becomes the other.
    pub how: &'static str,
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
        let form = if Description::is_in(dir) { Form::Ascend } else { Form::HuggingFace };
        let config = Config::read(dir, form)?;
        let description = if form == Form::Ascend { Some(Description::read(dir)?) } else { None };
        let shards = Shards::open(dir, form)?;
        let parts = Parts::of(&config, &shards, form).map_err(|fault| shards.at_fault(dir, fault))?;
        if let Some(description) = description {
            description.check_covers(&shards)?;
        }
        let Parts { layers, final_norm, embedding, head, spare_head } = parts;
        let head_source = match spare_head {
            None if config.tied => HeadSource::Tied,
            None => HeadSource::Own,
            Some(head) if repeats(&shards, &head, &embedding) => HeadSource::TiedRepeated,
            Some(_) => HeadSource::TiedOverridden,
        };
        let (dir, remarks) = (dir.to_path_buf(), Vec::new());
        let mut checkpoint =
            Self { dir, form, config, shards, layers, final_norm, embedding, head, head_source, remarks };
        checkpoint.remarks = checkpoint.remark();
        Ok(checkpoint)
    }

    /// What is odd and yet does not keep the model from being computed.
    fn remark(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        match self.head_source {
            HeadSource::Own | HeadSource::Tied => {}
            HeadSource::TiedRepeated => {
                remarks.push(format!("tie_word_embeddings is true, and `{HEAD}` repeats `{EMBEDDING}`"));
            }
            HeadSource::TiedOverridden => remarks.push(format!(
                "tie_word_embeddings is true, but `{HEAD}` differs from `{EMBEDDING}`; the embedding is used"
            )),
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
        if self.config.stop_ids.is_empty() {
            let files = format!("neither {CONFIG_FILE} nor {GENERATION_FILE}");
            remarks.push(format!("{files} lists a stop id: a generation ends at its limit of tokens alone"));
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

    /// How the directory names and declares its tensors.
    #[must_use]
    pub fn form(&self) -> Form {
        self.form
    }

    /// Ids that end a generation: those of `config.json`, then those of `generation_config.json`, each once.
    #[must_use]
    pub fn stop_ids(&self) -> &[usize] {
        &self.config.stop_ids
    }

    /// The same ids in the same order, with the files that list them.
    #[must_use]
    pub fn stop_sources(&self) -> &[StopId] {
        &self.config.stop_sources
    }

    /// Whether the head is the embedding.
    #[must_use]
    pub fn tied(&self) -> bool {
        self.head.is_none()
    }

    /// Where the head comes from, by the tie flag and by what is there.
    #[must_use]
    pub fn head_source(&self) -> HeadSource {
        self.head_source
    }

    /// Tensors that are stored as one type and used as another, each group once.
    #[must_use]
    pub fn conversions(&self) -> Vec<Conversion> {
        const ROUNDED: &str = "rounded, ties to even";
        const WIDENED: &str = "widened, exact";
        let mut found: Vec<Conversion> = Vec::new();
        for (name, place) in &self.shards.tensors {
            let (tensors, to, how) = match (name.rsplit('.').nth(1), place.dtype) {
                (Some("embed_tokens"), Dtype::F32) => ("embedding", Dtype::BF16, ROUNDED),
                (Some("lm_head"), Dtype::F32) if self.head.is_some() => ("head", Dtype::BF16, ROUNDED),
                (Some("lm_head" | "embed_tokens"), _) => continue,
                (Some("down_proj"), Dtype::I8) => {
                    ("down projections", Dtype::BF16, "times scale, rounded, ties to even")
                }
                (_, Dtype::BF16) if name.ends_with("_scale") => ("scales", Dtype::F32, WIDENED),
                (_, Dtype::BF16) => ("norms", Dtype::F32, WIDENED),
                _ => continue,
            };
            let conversion = Conversion { tensors, from: place.dtype.to_string(), to: to.to_string(), how };
            if !found.contains(&conversion) {
                found.push(conversion);
            }
        }
        found
    }

    /// Which model this is: the same for the same numbers, whatever the form, the shards and the types that hold them
    /// (`docs/checkpoints.md`, Fingerprint). Reads every weight once, on all threads; `progress` is told the bytes read
    /// so far and those of all tensors.
    #[must_use]
    pub fn fingerprint(&self, progress: &(dyn Fn(u64, u64) + Sync)) -> Fingerprint {
        fn floats(name: String, values: &Array1<f32>, shape: Vec<usize>) -> Named<'_> {
            // An array that was collected lies in one piece.
            let bytes = bytemuck::cast_slice(values.as_slice().unwrap_or_default());
            Named { name, dtype: Dtype::F32, shape, bytes }
        }
        let mut tensors = vec![floats(FINAL_NORM.to_owned(), &self.final_norm, vec![self.final_norm.len()])];
        for (name, view) in [(EMBEDDING, self.embed_tokens()), (HEAD, self.lm_head())] {
            let shape = view.shape().to_vec();
            let bytes = bytemuck::cast_slice(view.to_slice().unwrap_or_default());
            tensors.push(Named { name: name.to_owned(), dtype: Dtype::BF16, shape, bytes });
        }
        for (index, layer) in self.layers.iter().enumerate() {
            for (module, norm) in NORMS.iter().zip(&layer.norms) {
                tensors.push(floats(layout::name(index, module, "weight"), norm, vec![norm.len()]));
            }
            for ((module, scale), codes) in PROJECTIONS.iter().zip(&layer.scales).zip(&layer.codes) {
                tensors.push(floats(layout::name(index, module, "weight_scale"), scale, vec![scale.len(), 1]));
                let (dtype, shape, bytes) = (codes.dtype, codes.shape.clone(), self.shards.bytes(codes));
                tensors.push(Named { name: layout::name(index, module, "weight"), dtype, shape, bytes });
            }
        }
        fingerprint(self.geometry(), self.rope_theta(), tensors, progress)
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
    fn of(config: &Config, shards: &Shards, form: Form) -> Result<Self, CheckpointFault> {
        let (geometry, tied) = (&config.geometry, config.tied);
        let spare_head = tensors::check_all(shards, geometry, tied, form)?;
        let layers = 0..geometry.num_hidden_layers;
        Ok(Self {
            layers: layers.map(|layer| Layer::read(shards, layer, form)).collect::<Result<_, _>>()?,
            final_norm: vector(shards, FINAL_NORM, finite)?,
            embedding: Matrix::at(place(shards, EMBEDDING)?),
            head: if tied { None } else { Some(Matrix::at(place(shards, HEAD)?)) },
            spare_head,
        })
    }
}

/// Whether two matrices hold the same numbers, as they are used.
fn repeats(shards: &Shards, head: &Place, embedding: &Matrix) -> bool {
    if head.dtype == embedding.place.dtype {
        return shards.bytes(head) == shards.bytes(&embedding.place);
    }
    let head = Matrix::at(head.clone());
    let bits = |bytes: ArrayView2<'_, bf16>| bytes.map(|value| value.to_bits());
    bits(head.view(shards)) == bits(embedding.view(shards))
}

impl Layer {
    fn read(shards: &Shards, layer: usize, form: Form) -> Result<Self, CheckpointFault> {
        if form == Form::Ascend {
            for module in PROJECTIONS {
                vector(shards, &layout::name(layer, module, "weight_offset"), offset_value)?;
            }
        }
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
    made.try_into().map_err(|_| std::io::Error::other("not as many tensors as names").into())
}
