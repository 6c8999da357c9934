//! `assay model`: show a checkpoint, make a synthetic one.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use cases::Checkpoint;
use cases::checkpoint::{Synthesis, synthesize};
use clap::{Args, Subcommand};
use reference::Geometry;
use serde::Serialize;

use super::show::{Format, json, table};
use crate::exit_codes::Code;
use crate::output;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::{grouped, place, plain, plural};

/// What to do with checkpoints.
#[derive(Subcommand)]
pub enum Command {
    /// Check a W8A8 checkpoint and show what it holds: geometry, shards, tensors, what is odd
    Inspect {
        /// Directory of the checkpoint
        dir: PathBuf,
        /// Count the INT8 codes that are -128; reads every weight once
        #[arg(long)]
        codes: bool,
        /// Format on standard output
        #[arg(long, value_enum, default_value_t = Format::Human)]
        format: Format,
    },
    /// Write a checkpoint of seeded random weights, for benchmarks and tests
    Synthesize(Synthesize),
}

/// Parameters of a synthetic checkpoint.
#[derive(Args)]
pub struct Synthesize {
    /// Where to write it: a new or empty directory
    dir: PathBuf,
    /// A named geometry
    #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(Geometry::NAMES))]
    geometry: String,
    /// Layers, at most as many as the geometry has; default: all of them
    #[arg(long)]
    layers: Option<usize>,
    /// Seed of the weights
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Replace files of the same names when they are there
    #[arg(long)]
    force: bool,
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request or the checkpoint.
    pub fn run(&self) -> Result<Code, Refusal> {
        match self {
            Self::Inspect { dir, codes, format } => inspect(dir, *codes, *format)?,
            Self::Synthesize(synthesize) => synthesize.run()?,
        }
        Ok(Code::Pass)
    }
}

impl Synthesize {
    fn run(&self) -> Result<(), Refusal> {
        let mut geometry = Geometry::named(&self.geometry)
            .ok_or_else(|| Refusal::Request(format!("no geometry is called `{}`", self.geometry)))?;
        let most = geometry.num_hidden_layers;
        geometry.num_hidden_layers = self.layers.unwrap_or(most);
        if !(1..=most).contains(&geometry.num_hidden_layers) {
            let (layers, name) = (geometry.num_hidden_layers, &self.geometry);
            return Err(Refusal::Request(format!(
                "--layers {layers}: geometry `{name}` has {most} layers; ask for 1 to {most}"
            )));
        }
        let mut bar = None;
        let synthesis = Synthesis { geometry, seed: self.seed, replace: self.force };
        let mut progress = |written, total| bar.get_or_insert_with(|| Bar::of_bytes(total)).reached(written);
        synthesize(&self.dir, &synthesis, &mut progress).map_err(|error| match error {
            cases::checkpoint::SynthesisError::NotEmpty(dir) => Refusal::Request(format!(
                "{}: is not empty; name a new directory, or pass --force to replace files of the same names",
                dir.display()
            )),
            other => other.into(),
        })
    }
}

/// What a checkpoint holds.
#[derive(Serialize)]
struct Summary {
    path: String,
    scheme: &'static str,
    geometry: Sizes,
    rope_theta: f64,
    max_position_embeddings: Option<usize>,
    tie_word_embeddings: bool,
    stop_ids: Vec<usize>,
    tensor_bytes: usize,
    shards: Vec<ShardSummary>,
    dtypes: BTreeMap<String, Share>,
    tensors: Vec<TensorSummary>,
    codes_of_minus_128: Option<u64>,
    remarks: Vec<String>,
}

/// A geometry, under the names of `config.json`.
#[derive(Serialize)]
struct Sizes {
    hidden_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    vocab_size: usize,
    rms_norm_eps: f32,
}

#[derive(Serialize)]
struct ShardSummary {
    file: String,
    bytes: usize,
    tensors: usize,
}

/// Tensors of one element type.
#[derive(Default, Serialize)]
struct Share {
    tensors: usize,
    bytes: usize,
}

#[derive(Serialize)]
struct TensorSummary {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: usize,
    shard: String,
}

impl Summary {
    fn of(checkpoint: &Checkpoint, codes: bool) -> Self {
        let geometry = checkpoint.geometry();
        let file = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut dtypes: BTreeMap<String, Share> = BTreeMap::new();
        for tensor in checkpoint.tensors() {
            let share = dtypes.entry(tensor.dtype).or_default();
            share.tensors += 1;
            share.bytes += tensor.bytes;
        }
        let shards = checkpoint.shards().iter();
        let tensors = checkpoint.tensors().map(|tensor| TensorSummary {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
            bytes: tensor.bytes,
            shard: file(tensor.shard),
        });
        Self {
            path: place(checkpoint.dir()),
            scheme: "W8A8: INT8 weights, a scale an output channel; INT8 activations, a scale a token",
            geometry: Sizes {
                hidden_size: geometry.hidden_size,
                num_attention_heads: geometry.num_attention_heads,
                num_key_value_heads: geometry.num_key_value_heads,
                head_dim: geometry.head_dim,
                intermediate_size: geometry.intermediate_size,
                num_hidden_layers: geometry.num_hidden_layers,
                vocab_size: geometry.vocab_size,
                rms_norm_eps: geometry.rms_norm_eps,
            },
            rope_theta: checkpoint.rope_theta(),
            max_position_embeddings: checkpoint.max_positions(),
            tie_word_embeddings: checkpoint.tied(),
            stop_ids: checkpoint.stop_ids().to_vec(),
            tensor_bytes: dtypes.values().map(|share| share.bytes).sum(),
            shards: shards
                .map(|shard| ShardSummary { file: file(&shard.path), bytes: shard.length(), tensors: shard.tensors })
                .collect(),
            dtypes,
            tensors: tensors.collect(),
            codes_of_minus_128: codes.then(|| checkpoint.lowest_codes()),
            remarks: checkpoint.remarks().to_vec(),
        }
    }
}

fn inspect(dir: &Path, codes: bool, format: Format) -> Result<(), Refusal> {
    let summary = Summary::of(&Checkpoint::open(dir)?, codes);
    if format == Format::Json { json(&summary) } else { output::stdout(&human(&summary)) }
}

fn human(model: &Summary) -> String {
    let mut out = String::new();
    let sizes = &model.geometry;
    let mut line = |what: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{what:<10} {}", plain(value));
    };
    line("checkpoint", &model.path);
    line("scheme", model.scheme);
    line(
        "geometry",
        &format!(
            "hidden {}, {} heads, {} KV heads of {}, intermediate {}, {}, vocabulary {}",
            sizes.hidden_size,
            sizes.num_attention_heads,
            sizes.num_key_value_heads,
            sizes.head_dim,
            sizes.intermediate_size,
            plural(sizes.num_hidden_layers as u64, "layer"),
            grouped(sizes.vocab_size as u64),
        ),
    );
    let longest = model.max_position_embeddings.map(|most| format!(", contexts up to {most}")).unwrap_or_default();
    line("positions", &format!("rope_theta {}{longest}", model.rope_theta));
    line("head", if model.tie_word_embeddings { "tied to the embedding" } else { "of its own" });
    let ids: Vec<String> = model.stop_ids.iter().map(usize::to_string).collect();
    line("stop ids", if ids.is_empty() { "none".to_owned() } else { ids.join(", ") }.as_str());
    line("tensors", &format!("{}, {} bytes", model.tensors.len(), grouped(model.tensor_bytes as u64)));
    if let Some(count) = model.codes_of_minus_128 {
        let bytes = model.dtypes.get("I8").map_or(0, |share| share.bytes);
        line("codes", &format!("{} of {} are -128", grouped(count), grouped(bytes as u64)));
    }
    out.push('\n');
    let count = |number: usize| grouped(number as u64);
    let shards = model.shards.iter().map(|shard| [shard.file.clone(), count(shard.tensors), count(shard.bytes)]);
    table(&mut out, ["shard", "tensors", "bytes"], shards);
    out.push('\n');
    let kinds = model.dtypes.iter().map(|(dtype, share)| [dtype.clone(), count(share.tensors), count(share.bytes)]);
    table(&mut out, ["type", "tensors", "bytes"], kinds);
    out.push('\n');
    // Layers are alike: one of them says what all hold, unless they differ in type.
    let mut alike: BTreeMap<(String, String, String), (usize, usize)> = BTreeMap::new();
    for tensor in &model.tensors {
        let shape = tensor.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        let (count, bytes) = alike.entry((layerless(&tensor.name), tensor.dtype.clone(), shape)).or_default();
        *count += 1;
        *bytes += tensor.bytes;
    }
    let rows = alike
        .into_iter()
        .map(|((name, dtype, shape), (number, bytes))| [name, number.to_string(), dtype, shape, count(bytes)]);
    table(&mut out, ["tensor", "number", "type", "shape", "bytes"], rows);
    for remark in &model.remarks {
        let _ = writeln!(out, "\nremark: {}", plain(remark));
    }
    out
}

/// The name with `N` for its layer.
fn layerless(name: &str) -> String {
    let parts = name.split('.').map(|part| if part.parse::<usize>().is_ok() { "N" } else { part });
    parts.collect::<Vec<_>>().join(".")
}
