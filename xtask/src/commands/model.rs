//! `assay model`: show a checkpoint, quantize one, make a synthetic one.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cases::Checkpoint;
use cases::checkpoint::{
    CONFIG_FILE, GENERATION_FILE, HeadSource, Quantization, QuantizeError, Rule, Synthesis, SynthesisError, WriteError,
    quantize, synthesize,
};
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
        /// Compute the fingerprint of the model: the same for the same numbers, however they are stored; reads every
        /// weight once
        #[arg(long)]
        fingerprint: bool,
        /// Format on standard output
        #[arg(long, value_enum, default_value_t = Format::Human)]
        format: Format,
    },
    /// Make a W8A8 checkpoint of a BF16 one: INT8 weights, a scale for each output channel
    Quantize(Quantize),
    /// Write a checkpoint of seeded random weights, for benchmarks and tests
    Synthesize(Synthesize),
}

/// Parameters of a quantization.
#[derive(Args)]
pub struct Quantize {
    /// Directory of the BF16 checkpoint
    source: PathBuf,
    /// Where to write: a new or empty directory
    dir: PathBuf,
    /// Arithmetic: this project's own (largest magnitude over 127 in FP32, codes -127 to 127), or a compressor's
    #[arg(long, default_value = Rule::Float32.name(), value_parser =
        clap::builder::PossibleValuesParser::new(Rule::ALL.map(Rule::name)))]
    rule: String,
    /// Replace files of the same names when they are there
    #[arg(long)]
    force: bool,
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
            Self::Inspect { dir, codes, fingerprint, format } => inspect(dir, *codes, *fingerprint, *format)?,
            Self::Quantize(quantize) => quantize.run()?,
            Self::Synthesize(synthesize) => synthesize.run()?,
        }
        Ok(Code::Pass)
    }
}

impl Quantize {
    fn run(&self) -> Result<(), Refusal> {
        let rule =
            Rule::named(&self.rule).ok_or_else(|| Refusal::Request(format!("no rule is called `{}`", self.rule)))?;
        let quantization = Quantization { rule, replace: self.force };
        let mut bar = None;
        let mut progress = |written, total| bar.get_or_insert_with(|| Bar::of_bytes(total)).reached(written);
        quantize(&self.source, &self.dir, &quantization, &mut progress).map_err(|error| match error {
            QuantizeError::Write(WriteError::NotEmpty(dir)) => not_empty(&dir),
            other => other.into(),
        })
    }
}

fn not_empty(dir: &Path) -> Refusal {
    let advice = "name a new directory, or pass --force to replace files of the same names";
    Refusal::Request(format!("{}: is not empty; {advice}", dir.display()))
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
            SynthesisError::Write(WriteError::NotEmpty(dir)) => not_empty(&dir),
            SynthesisError::Write(error @ WriteError::Space { .. }) => {
                Refusal::Request(format!("{error}, or ask for fewer layers"))
            }
            other => other.into(),
        })
    }
}

/// What a checkpoint holds.
#[derive(Serialize)]
struct Summary {
    path: String,
    form: &'static str,
    scheme: &'static str,
    geometry: Sizes,
    rope_theta: f64,
    max_position_embeddings: Option<usize>,
    tie_word_embeddings: bool,
    head: &'static str,
    stop_ids: Vec<usize>,
    stop_id_sources: Vec<StopSource>,
    tensor_bytes: usize,
    shards: Vec<ShardSummary>,
    dtypes: BTreeMap<String, Share>,
    conversions: Vec<ConversionSummary>,
    tensors: Vec<TensorSummary>,
    codes_of_minus_128: Option<u64>,
    fingerprint: Option<String>,
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

/// An id that ends a generation, and the files that list it.
#[derive(Serialize)]
struct StopSource {
    id: usize,
    files: Vec<&'static str>,
}

/// Tensors that are stored as one type and used as another.
#[derive(Serialize)]
struct ConversionSummary {
    tensors: &'static str,
    from: String,
    to: String,
    how: &'static str,
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
    fn of(checkpoint: &Checkpoint, codes: bool, fingerprint: bool) -> Self {
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
            form: checkpoint.form().name(),
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
            head: match checkpoint.head_source() {
                HeadSource::Own => "of its own",
                HeadSource::Tied => "tied to the embedding",
                HeadSource::TiedRepeated => "tied to the embedding, which the stored head repeats",
                HeadSource::TiedOverridden => "tied to the embedding; the stored head differs and is not used",
            },
            stop_ids: checkpoint.stop_ids().to_vec(),
            stop_id_sources: checkpoint
                .stop_sources()
                .iter()
                .map(|stop| StopSource { id: stop.id, files: stop.files.clone() })
                .collect(),
            tensor_bytes: dtypes.values().map(|share| share.bytes).sum(),
            shards: shards
                .map(|shard| ShardSummary { file: file(&shard.path), bytes: shard.length(), tensors: shard.tensors })
                .collect(),
            dtypes,
            conversions: checkpoint
                .conversions()
                .into_iter()
                .map(|kind| ConversionSummary { tensors: kind.tensors, from: kind.from, to: kind.to, how: kind.how })
                .collect(),
            tensors: tensors.collect(),
            codes_of_minus_128: codes.then(|| checkpoint.lowest_codes()),
            fingerprint: fingerprint.then(|| fingerprint_of(checkpoint)),
            remarks: checkpoint.remarks().to_vec(),
        }
    }
}

fn fingerprint_of(checkpoint: &Checkpoint) -> String {
    let bar = OnceLock::new();
    let progress = |done, total| bar.get_or_init(|| Bar::of_bytes(total)).reached(done);
    checkpoint.fingerprint(&progress).to_string()
}

fn inspect(dir: &Path, codes: bool, fingerprint: bool, format: Format) -> Result<(), Refusal> {
    let summary = Summary::of(&Checkpoint::open(dir)?, codes, fingerprint);
    if format == Format::Json { json(&summary) } else { output::stdout(&human(&summary)) }
}

fn human(model: &Summary) -> String {
    let mut out = String::new();
    let sizes = &model.geometry;
    let mut line = |what: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{what:<11} {}", plain(value));
    };
    line("checkpoint", &model.path);
    line("form", model.form);
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
    line("head", model.head);
    line("stop ids", &stop_ids(model));
    for kind in &model.conversions {
        line("used as", &format!("{}: {}, stored as {} ({})", kind.tensors, kind.to, kind.from, kind.how));
    }
    line("tensors", &format!("{}, {} bytes", model.tensors.len(), grouped(model.tensor_bytes as u64)));
    if let Some(count) = model.codes_of_minus_128 {
        let bytes = model.dtypes.get("I8").map_or(0, |share| share.bytes);
        line("codes", &format!("{} of {} are -128", grouped(count), grouped(bytes as u64)));
    }
    if let Some(fingerprint) = &model.fingerprint {
        line("fingerprint", fingerprint);
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

/// The ids that end a generation, and which file lists which.
fn stop_ids(model: &Summary) -> String {
    let list = |ids: &mut dyn Iterator<Item = usize>| ids.map(|id| id.to_string()).collect::<Vec<_>>().join(", ");
    let listed = [CONFIG_FILE, GENERATION_FILE].map(|file| {
        let here = model.stop_id_sources.iter().filter(|stop| stop.files.contains(&file));
        let ids = list(&mut here.map(|stop| stop.id));
        if ids.is_empty() { format!("{file}: none") } else { format!("{file}: {ids}") }
    });
    match model.stop_ids.is_empty() {
        true => "none".to_owned(),
        false => format!("{} ({})", list(&mut model.stop_ids.iter().copied()), listed.join("; ")),
    }
}

/// The name with `N` for its layer.
fn layerless(name: &str) -> String {
    let parts = name.split('.').map(|part| if part.parse::<usize>().is_ok() { "N" } else { part });
    parts.collect::<Vec<_>>().join(".")
}
