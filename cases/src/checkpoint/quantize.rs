//! Quantization of a checkpoint: BF16 projections become INT8 codes and scales, channel by channel and a few rows at a
//! time; everything else is copied. The result has Hugging Face's layout and is whole or not there.

use std::borrow::Cow;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use rayon::prelude::*;
use reference::rounding::{Rounding, to_bf16};
use safetensors::Dtype;
use serde_json::{Map, Value};
use thiserror::Error;

use super::ascend::Description;
use super::config::{Config, quantization_config};
use super::error::{CheckpointError, CheckpointFault};
use super::layout::{self, Expected, Form, Part};
use super::rule::Rule;
use super::shards::Shards;
use super::staging::{self, Output, Slot, WriteError, at};
use super::{CONFIG_FILE, DESCRIPTION_FILE, GENERATION_FILE, json, tensors};

/// Bytes read at a time.
const PART: usize = 16 << 20;

/// What lies beside the weights and belongs to the model all the same.
const COMPANIONS: [&str; 8] = [
    GENERATION_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// How to quantize.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    /// The arithmetic.
    pub rule: Rule,
    /// Whether the directory may hold something already: files of the same names are replaced.
    pub replace: bool,
}

/// Why there is no quantized checkpoint.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum QuantizeError {
    #[error(transparent)]
    Source(#[from] CheckpointError),
    #[error("{}: is the checkpoint that is to be quantized; name another directory", .0.display())]
    SameDirectory(PathBuf),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(
        "{}: tensor `{tensor}`: [{row}, {column}] is {value}; a weight has to be finite for its channel to have a scale",
        shard.display()
    )]
    NotFinite { shard: PathBuf, tensor: String, row: usize, column: usize, value: f32 },
}

/// A BF16 checkpoint, consistent in every name, type and shape.
struct Source<'a> {
    dir: &'a Path,
    config: Config,
    /// `config.json` with all its keys.
    raw: Map<String, Value>,
    shards: Shards,
}

/// Quantizes the BF16 checkpoint in `source` and writes the result into `dir`, which is made when it is not there and
/// becomes a checkpoint only when all of it is whole. Reads and writes one tensor at a time; `progress` is told the
/// bytes written so far and those of all tensors.
///
/// # Errors
/// A source that is inconsistent, quantized already or holds a weight that is not finite; a directory in use, too
/// little space, or what the file system says.
pub fn quantize(
    source: &Path,
    dir: &Path,
    quantization: &Quantization,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), QuantizeError> {
    let opened = Source::open(source)?;
    if let (Ok(from), Ok(to)) = (source.canonicalize(), dir.canonicalize())
        && from == to
    {
        return Err(QuantizeError::SameDirectory(dir.to_path_buf()));
    }
    let slots = opened.slots(quantization.rule);
    let total = slots.iter().map(|slot| slot.bytes() as u64).sum();
    staging::write_whole(dir, quantization.replace, total, |staging| {
        opened.write(staging, slots, quantization.rule, progress)
    })
}

impl<'a> Source<'a> {
    fn open(dir: &'a Path) -> Result<Self, CheckpointError> {
        if !fs::metadata(dir).map_err(|error| CheckpointError::new(dir, error))?.is_dir() {
            return Err(CheckpointError::new(dir, CheckpointFault::NotADirectory));
        }
        if Description::is_in(dir) {
            let (key, found) = (DESCRIPTION_FILE.to_owned(), "is there".to_owned());
            let expected =
                "none: what is quantized is a checkpoint in BF16, and this one is quantized already".to_owned();
            return Err(CheckpointError::new(dir, CheckpointFault::Config { key, found, expected }));
        }
        let config = Config::read(dir, Form::Unquantized)?;
        let raw = json::read(&dir.join(CONFIG_FILE))?.unwrap_or_default();
        let shards = Shards::open(dir, Form::Unquantized)?;
        let checked = tensors::check_all(&shards, &config.geometry, config.tied, Form::Unquantized);
        checked.map_err(|fault| shards.at_fault(dir, fault))?;
        Ok(Self { dir, config, raw, shards })
    }

    /// The tensors of the result: the embedding first, final norm and head after the layers, as a model runs.
    fn slots(&self, rule: Rule) -> Vec<Slot> {
        let Config { geometry, tied, .. } = &self.config;
        let layers = (0..geometry.num_hidden_layers).flat_map(|layer| layout::of_layer(geometry, layer));
        let mut order = layout::outside(geometry, *tied);
        let after = order.split_off(1);
        let slot = |Expected { name, part, shape }| {
            let dtype = match part {
                Part::Codes => Dtype::I8,
                Part::Scale => rule.scale_type(),
                _ => self.shards.tensors.get(&name).map_or(Dtype::BF16, |place| place.dtype),
            };
            Slot { name, dtype, shape }
        };
        order.into_iter().chain(layers).chain(after).map(slot).collect()
    }

    /// Writes all files of the result into `dir`; their names, `config.json` last.
    fn write(
        &self,
        dir: &Path,
        slots: Vec<Slot>,
        rule: Rule,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Vec<String>, QuantizeError> {
        let mut output = Output::create(dir, slots.clone(), progress)?;
        for Slot { name, dtype, .. } in &slots {
            if *dtype == Dtype::I8 {
                self.quantize(name, rule, &mut output)?;
            } else if let Some(place) = self.shards.tensors.get(name) {
                for (part, bytes) in self.shards.bytes(place).chunks(PART).enumerate() {
                    output.put(name, part * PART, bytes)?;
                }
            }
        }
        let mut names = output.finish()?;
        for name in COMPANIONS {
            let path = self.dir.join(name);
            if path.is_file() {
                fs::copy(&path, dir.join(name)).map_err(at(&path))?;
                names.push(name.to_owned());
            }
        }
        let mut config = self.raw.clone();
        config.insert("quantization_config".to_owned(), quantization_config());
        names.push(staging::write_json(dir, CONFIG_FILE, &Value::Object(config))?);
        Ok(names)
    }

    /// Quantizes a projection: its codes as they come, and then its scales.
    fn quantize(&self, weight: &str, rule: Rule, output: &mut Output<'_>) -> Result<(), QuantizeError> {
        let place = tensors::place(&self.shards, weight).map_err(|fault| self.shards.at_fault(self.dir, fault))?;
        let columns = place.shape.last().copied().unwrap_or_default().max(1);
        let rows = (PART / (2 * columns)).max(1);
        let mut scales = Vec::new();
        for (part, bytes) in self.shards.bytes(&place).chunks(rows * columns * 2).enumerate() {
            let mut codes = vec![0i8; bytes.len() / 2];
            let channels = bytes.par_chunks(columns * 2).zip(codes.par_chunks_mut(columns));
            let made: Vec<_> = channels.map(|(bytes, codes)| rule.quantize(&weights(bytes), codes)).collect();
            for (row, scale) in made.into_iter().enumerate() {
                scales.push(scale.map_err(|fault| QuantizeError::NotFinite {
                    shard: self.shards.files.get(place.shard).map_or(self.dir, |shard| &shard.path).to_path_buf(),
                    tensor: weight.to_owned(),
                    row: part * rows + row,
                    column: fault.index,
                    value: fault.value,
                })?);
            }
            output.put(weight, part * rows * columns, bytemuck::cast_slice(&codes))?;
        }
        let bytes: Vec<u8> = match rule.scale_type() {
            // Rounded by the rule already, so that this is exact.
            Dtype::BF16 => scales.iter().flat_map(|scale| to_bf16(*scale, Rounding::Rne).to_le_bytes()).collect(),
            _ => scales.iter().flat_map(|scale| scale.to_le_bytes()).collect(),
        };
        Ok(output.put(&format!("{weight}_scale"), 0, &bytes)?)
    }
}

/// BF16 numbers where they lie, or copied from an odd address.
fn weights(bytes: &[u8]) -> Cow<'_, [bf16]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(weights) => Cow::Borrowed(weights),
        Err(_) => Cow::Owned(bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes)).collect()),
    }
}
