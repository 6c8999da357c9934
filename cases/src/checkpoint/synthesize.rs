//! Synthetic checkpoints: a named geometry filled by the seeded generator, for benchmarks and tests that need a model
//! of full size and no particular one. Tensors are drawn a few rows at a time and written as they are drawn, so that
//! memory stays small; scales are such that activations stay of order 1 through any number of layers.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use reference::geometry::GeometryError;
use reference::{DType, Geometry};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use thiserror::Error;

use super::layout::{self, EMBEDDING, Expected, HEAD, Part};
use super::{CONFIG_FILE, GENERATION_FILE, INDEX_FILE, SINGLE_FILE};
use crate::atomic::{is_temporary, temporary_directory_in};
use crate::header::{Entry, Header, HeaderError};
use crate::inputs::bytes;
use crate::recipe::{OutlierColumns, Recipe, RecipeKind};
use crate::seeded::{self, SeededError};

/// Largest shard, as hubs like them; a single larger tensor has a shard of its own.
const SHARD: usize = 4_000_000_000;
/// Bytes drawn at a time.
const PART: usize = 16 << 20;
/// Standard deviation of the INT8 codes.
const CODE_STD: u32 = 32;
/// Standard deviation of the logits.
const LOGIT_STD: f64 = 2.0;
/// Base of the rotary frequencies, and longest context.
const ROPE_THETA: f64 = 1e6;
const MAX_POSITIONS: usize = 4096;

/// What to synthesize.
#[derive(Clone, Debug, PartialEq)]
pub struct Synthesis {
    /// Sizes. As many rows of vocabulary are stored as are real.
    pub geometry: Geometry,
    /// Seed of every tensor.
    pub seed: u64,
    /// Whether the directory may hold something already: files of the same names are replaced.
    pub replace: bool,
}

/// Why there is no synthetic checkpoint.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum SynthesisError {
    #[error("geometry: {0}")]
    Geometry(#[from] GeometryError),
    #[error("{}: is not empty; name a new directory, or ask for its files to be replaced", .0.display())]
    NotEmpty(PathBuf),
    #[error("{}: is being written by another process; let it end, or name another directory", .0.display())]
    Busy(PathBuf),
    #[error(
        "{}: the checkpoint takes {} MB, but the file system has {} MB free; make room or ask for fewer layers{}",
        path.display(), needed.div_ceil(1_000_000), free / 1_000_000,
        if *beside { " (what the directory holds stays until the new one is whole, and needs its room)" } else { "" }
    )]
    Space { path: PathBuf, needed: u64, free: u64, beside: bool },
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("tensor `{tensor}`: {error}")]
    Generate { tensor: String, error: SeededError },
    #[error("header: {0}")]
    Header(#[from] HeaderError),
}

/// Writes a synthetic checkpoint into `dir`, which is made when it is not there. All files are written into a temporary
/// directory inside it first and moved when the last of them is whole: until then an old checkpoint stays as it was,
/// and so it does when the request is refused or the writing fails. While files are moved there is no `config.json`,
/// so that an interrupted run never leaves a mixture that opens. `progress` is told the bytes written so far and those
/// of all tensors.
///
/// # Errors
/// A geometry that cannot be computed, a directory in use, too little space, or what the file system says.
pub fn synthesize(dir: &Path, synthesis: &Synthesis, progress: &mut dyn FnMut(u64, u64)) -> Result<(), SynthesisError> {
    let mut geometry = synthesis.geometry.clone();
    geometry.vocab_size = geometry.real_vocab_size;
    geometry.validate()?;
    let made: Vec<&Path> = dir
        .ancestors()
        .take_while(|above| !above.as_os_str().is_empty() && above.symlink_metadata().is_err())
        .collect();
    fs::create_dir_all(dir).map_err(at(dir))?;
    let _lock = lock(dir)?;
    let done = synthesize_into(dir, &geometry, synthesis, progress);
    if done.is_err() {
        // Directories that were made for nothing; what somebody else has put something into stays. The lock is still
        // held: without it, an empty directory may be one that another run has just begun with.
        for directory in made {
            let _ = fs::remove_dir(directory);
        }
    }
    done
}

fn synthesize_into(
    dir: &Path,
    geometry: &Geometry,
    synthesis: &Synthesis,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), SynthesisError> {
    let total = total_bytes(geometry);
    let leftovers = prepare(dir, synthesis.replace)?;
    // Left by runs that were interrupted: nobody writes them any more, and their room is ours.
    let freed: u64 = leftovers.iter().map(|path| size(path)).sum();
    let free = fs4::available_space(dir).map_err(at(dir))?.saturating_add(freed);
    check_space(dir, total, free, synthesis.replace)?;
    for path in leftovers {
        remove(&path).map_err(at(&path))?;
    }
    let staging = temporary_directory_in(dir).map_err(at(dir))?;
    let names = write_files(staging.path(), geometry, synthesis.seed, total, progress)?;

    // What makes a directory a checkpoint of one kind or the other goes first, `config.json` before all.
    for name in [CONFIG_FILE, INDEX_FILE, SINGLE_FILE] {
        let path = dir.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&path)(error)),
            _ => {}
        }
    }
    for name in names {
        let path = dir.join(&name);
        fs::rename(staging.path().join(&name), &path).map_err(at(&path))?;
    }
    staging.close().map_err(at(dir))
}

/// Writes the files of a checkpoint into `dir`; their names, `config.json` last.
fn write_files(
    dir: &Path,
    geometry: &Geometry,
    seed: u64,
    total: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<String>, SynthesisError> {
    let shards = plan(geometry);
    let mut written = 0;
    let mut weight_map = Map::new();
    let mut names = Vec::new();
    for (index, tensors) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => SINGLE_FILE.to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        let path = dir.join(&name);
        let header = header(tensors).encode()?;
        let mut file = File::create(&path).map_err(at(&path))?;
        file.write_all(&header).map_err(at(&path))?;
        for tensor in tensors {
            tensor.write(seed, &mut file, &path, &mut |bytes| {
                written += bytes as u64;
                progress(written, total);
            })?;
            weight_map.insert(tensor.name.clone(), Value::String(name.clone()));
        }
        names.push(name);
    }
    weight_map.sort_keys();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let mut files = vec![(GENERATION_FILE, generation_config(geometry))];
    if shards.len() > 1 {
        files.push((INDEX_FILE, index));
    }
    files.push((CONFIG_FILE, config(geometry)));
    for (name, value) in files {
        let path = dir.join(name);
        fs::write(&path, format!("{value:#}\n")).map_err(at(&path))?;
        names.push(name.to_owned());
    }
    Ok(names)
}

/// What the file system says of a path, as an error of ours.
fn at(path: &Path) -> impl FnOnce(io::Error) -> SynthesisError + use<> {
    let path = path.to_path_buf();
    move |error| SynthesisError::Io { path, error }
}

/// Holds the directory itself for this process until the file is closed, so that no lock is left behind by a run that
/// was interrupted. `None` on systems and file systems that have no such locks.
fn lock(dir: &Path) -> Result<Option<File>, SynthesisError> {
    let Ok(directory) = File::open(dir) else { return Ok(None) };
    match directory.try_lock() {
        Ok(()) => Ok(Some(directory)),
        Err(TryLockError::WouldBlock) => Err(SynthesisError::Busy(dir.to_path_buf())),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

/// Refuses a directory in use; what interrupted runs left behind in one that may be used.
fn prepare(dir: &Path, replace: bool) -> Result<Vec<PathBuf>, SynthesisError> {
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(at(dir))?;
    if !entries.is_empty() && !replace {
        return Err(SynthesisError::NotEmpty(dir.to_path_buf()));
    }
    Ok(entries.iter().filter(|entry| is_temporary(&entry.file_name())).map(fs::DirEntry::path).collect())
}

/// Bytes of a file, or of the files in a directory; what cannot be read counts nothing.
fn size(path: &Path) -> u64 {
    match fs::read_dir(path) {
        Ok(entries) => entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|file| file.len()).sum(),
        Err(_) => path.symlink_metadata().map_or(0, |file| file.len()),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    if path.symlink_metadata()?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Refuses what would fill the file system, with the numbers.
fn check_space(path: &Path, needed: u64, free: u64, beside: bool) -> Result<(), SynthesisError> {
    if needed <= free { Ok(()) } else { Err(SynthesisError::Space { path: path.to_path_buf(), needed, free, beside }) }
}

/// Bytes of all tensors. Layers are alike, so that one of them tells.
fn total_bytes(geometry: &Geometry) -> u64 {
    let sum = |tensors: Vec<Expected>| -> u64 {
        tensors.into_iter().map(|tensor| Planned::new(geometry, tensor).bytes() as u64).sum()
    };
    let layers = sum(layout::of_layer(geometry, 0)).saturating_mul(geometry.num_hidden_layers as u64);
    sum(layout::outside(geometry, false)).saturating_add(layers)
}

/// A tensor to be written.
#[derive(Clone, Debug)]
struct Planned {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    recipe: Recipe,
}

/// Which tensors go into which shard: in the model's order, and within a shard what has two bytes an element first,
/// so that it is aligned.
fn plan(geometry: &Geometry) -> Vec<Vec<Planned>> {
    let layers = (0..geometry.num_hidden_layers).flat_map(|layer| layout::of_layer(geometry, layer));
    let mut order = layout::outside(geometry, false);
    // Embedding first, final norm and head after the layers, as a model runs.
    let after = order.split_off(1);
    let mut shards: Vec<Vec<Planned>> = Vec::new();
    let mut filled = SHARD;
    for expected in order.into_iter().chain(layers).chain(after) {
        let tensor = Planned::new(geometry, expected);
        if filled + tensor.bytes() > SHARD || shards.is_empty() {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += tensor.bytes();
        if let Some(shard) = shards.last_mut() {
            shard.push(tensor);
        }
    }
    for shard in &mut shards {
        shard.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bitsize()));
    }
    shards
}

fn header(tensors: &[Planned]) -> Header {
    let mut header = Header { metadata: [("format".to_owned(), "pt".to_owned())].into(), ..Header::default() };
    let mut end = 0;
    for tensor in tensors {
        let begin = end;
        end += tensor.bytes();
        let entry = Entry { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (begin, end) };
        header.tensors.insert(tensor.name.clone(), entry);
    }
    header
}

impl Planned {
    fn new(geometry: &Geometry, expected: Expected) -> Self {
        let Expected { name, part, shape } = expected;
        let normal = |mean, std| Recipe::new(RecipeKind::Normal { mean, std, bf16: false });
        let recipe = match part {
            Part::Codes => Recipe::new(RecipeKind::Int8Normal { std: CODE_STD }),
            Part::Scale => {
                let scale = weight_std(geometry, &name) / f64::from(CODE_STD);
                Recipe::new(RecipeKind::Uniform { lo: 0.5 * scale, hi: 1.5 * scale })
            }
            Part::Norm => normal(1.0, 0.1),
            Part::Matrix if name == HEAD => normal(0.0, LOGIT_STD / (geometry.hidden_size as f64).sqrt()),
            Part::Matrix => {
                let outliers = OutlierColumns { period: 512, phase: 37, factor: 16.0 };
                Recipe { outlier_columns: Some(outliers), ..normal(0.0, 1.0) }
            }
        };
        debug_assert!(part != Part::Matrix || name == HEAD || name == EMBEDDING);
        let dtype = if part == Part::Codes { Dtype::I8 } else { Dtype::BF16 };
        Self { name, dtype, shape, recipe }
    }

    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }

    /// Draws the tensor a part at a time and writes each part.
    fn write(
        &self,
        seed: u64,
        file: &mut File,
        path: &Path,
        wrote: &mut dyn FnMut(usize),
    ) -> Result<(), SynthesisError> {
        let (rows, columns) = match self.shape[..] {
            [rows, columns] => (rows, columns),
            _ => (1, self.shape.iter().product()),
        };
        let dtype = if self.dtype == Dtype::I8 { DType::I8 } else { DType::Bf16 };
        let step = (PART / (columns * dtype.size()).max(1)).max(1);
        for first in (0..rows).step_by(step) {
            let part = first..rows.min(first + step);
            let drawn = seeded::rows(seed, &self.name, dtype, part, columns, &self.recipe)
                .map_err(|error| SynthesisError::Generate { tensor: self.name.clone(), error })?;
            let bytes = bytes(&drawn);
            file.write_all(bytes).map_err(|error| SynthesisError::Io { path: path.to_path_buf(), error })?;
            wrote(bytes.len());
        }
        Ok(())
    }
}

/// Standard deviation of a projection's weights: what gives outputs of order 1 from inputs of order 1. The two
/// projections that add to the residual stream, 2 L of them, together add no more than it holds.
fn weight_std(geometry: &Geometry, name: &str) -> f64 {
    let module = |index: usize| name.contains(layout::PROJECTIONS[index]);
    let (depth, terms) = match (module(3), module(6)) {
        (true, _) => (geometry.q_width(), 2 * geometry.num_hidden_layers),
        (_, true) => (geometry.intermediate_size, 2 * geometry.num_hidden_layers),
        _ => (geometry.hidden_size, 1),
    };
    1.0 / (depth as f64 * terms as f64).sqrt()
}

/// `config.json`, with the keys that a reader of such checkpoints looks for.
fn config(geometry: &Geometry) -> Value {
    let scheme = |strategy, dynamic: bool| {
        json!({
            "num_bits": 8, "type": "int", "symmetric": true, "strategy": strategy, "dynamic": dynamic,
            "group_size": null,
        })
    };
    // The shortest decimal of the FP32 value, not the digits of its FP64 neighbour.
    let eps: f64 = geometry.rms_norm_eps.to_string().parse().unwrap_or(f64::from(geometry.rms_norm_eps));
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": false,
        "dtype": "bfloat16",
        "eos_token_id": geometry.real_vocab_size - 1,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": geometry.num_attention_heads,
        "num_hidden_layers": geometry.num_hidden_layers,
        "num_key_value_heads": geometry.num_key_value_heads,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "format": "int-quantized",
                    "input_activations": scheme("token", true),
                    "output_activations": null,
                    "targets": ["Linear"],
                    "weights": scheme("channel", false),
                },
            },
            "format": "int-quantized",
            "ignore": ["lm_head"],
            "kv_cache_scheme": null,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        "rms_norm_eps": eps,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": false,
        "use_sliding_window": false,
        "vocab_size": geometry.vocab_size,
    })
}

/// `generation_config.json`: greedy, and a second stop id that `config.json` does not have, as real models do.
fn generation_config(geometry: &Geometry) -> Value {
    let last = geometry.real_vocab_size - 1;
    json!({ "do_sample": false, "eos_token_id": [last, last.saturating_sub(1)] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_of_a_large_model_has_shards_of_at_most_4_gb() {
        let shards = plan(&Geometry::named("14b").unwrap());
        let sizes: Vec<usize> = shards.iter().map(|shard| shard.iter().map(Planned::bytes).sum()).collect();
        assert_eq!(sizes.len(), 5);
        assert!(sizes.iter().all(|size| *size <= SHARD), "{sizes:?}");
        assert_eq!(sizes.iter().sum::<usize>() / 1_000_000, 16_331);
        assert_eq!(shards.iter().flatten().count(), 3 + 40 * 18);
        assert_eq!(sizes.iter().sum::<usize>() as u64, total_bytes(&Geometry::named("14b").unwrap()));
    }

    #[test]
    fn too_little_space_is_told_in_numbers() {
        check_space(Path::new("d"), 10, 10, false).unwrap();
        let message = check_space(Path::new("d"), 16_300_000_001, 5_000_000_000, false).unwrap_err().to_string();
        assert!(message.contains("takes 16301 MB") && message.contains("5000 MB free"), "{message}");
    }
}
