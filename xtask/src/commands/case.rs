//! `assay case`: list the repository's cases, show one, make a new one, find one that shows a fault, make one smaller.

mod shrink;
mod suggest;

use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;

use cases::{Case, InputStore, Inputs, Kernel, NewCase, Padding, Suite};
use clap::{Args, Subcommand, ValueEnum};
use reference::{Geometry, PAGE};
use serde::Serialize;

use super::show::{Format, json, table};
use crate::exit_codes::Code;
use crate::refusal::Refusal;
use crate::report::text::{place, plain, ranges};
use crate::{output, suites};

/// What to do with cases.
#[derive(Subcommand)]
pub enum Command {
    /// List the repository's suites and their cases
    List {
        /// Format on standard output
        #[arg(long, value_enum, default_value_t = Format::Human)]
        format: Format,
    },
    /// Show what a case runs: geometry, batch, recipes, warnings
    Show {
        /// A case file or a bundle
        path: PathBuf,
        /// Format on standard output
        #[arg(long, value_enum, default_value_t = Format::Human)]
        format: Format,
    },
    /// Make a case file from a few parameters
    New(New),
    /// Which case would show a fault: for a case, the faults that its data cannot show, and cases that do
    Suggest(suggest::Suggest),
    /// Make a failing case smaller: the smallest that still fails the gate at the same first divergence
    Shrink(shrink::Shrink),
}

/// Parameters of a new case.
#[derive(Args)]
pub struct New {
    /// The case's name, e.g. mini/active3
    #[arg(long)]
    name: String,
    /// A named geometry
    #[arg(long, default_value = "mini", value_parser = clap::builder::PossibleValuesParser::new(Geometry::NAMES))]
    geometry: String,
    /// Layers, stacked
    #[arg(long, default_value_t = 1)]
    layers: usize,
    /// Seed of the generated inputs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Real rows, 1 to 16; default: as many as there are context lengths
    #[arg(long)]
    active_batch: Option<usize>,
    /// Context length of each active row, the token being decoded included
    #[arg(long, value_name = "LENGTH,...", value_delimiter = ',', required = true)]
    seq_lens: Vec<usize>,
    /// Rows of the RoPE tables: the longest context; default: the longest one given, in whole pages
    #[arg(long)]
    max_seq: Option<usize>,
    /// KV pages; default: what 16 rows can address, and a few to spare
    #[arg(long)]
    pages: Option<usize>,
    /// What padding rows hold; with 16 active rows there are none
    #[arg(long, value_enum, default_value_t = PaddingRows::ReplicateRow0)]
    padding: PaddingRows,
    /// Where to write the case; default: standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace the output file when it is there
    #[arg(long)]
    force: bool,
    /// Leave `inputs_sha256` empty rather than generate every input once
    #[arg(long)]
    no_hashes: bool,
}

/// What the rows behind the active ones hold.
#[derive(Clone, Copy, ValueEnum)]
enum PaddingRows {
    /// Row 0's hidden state, slot and pages, as in serving
    #[value(name = "replicate_row0")]
    ReplicateRow0,
    /// Their own
    Own,
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request, or with a file that it names.
    pub fn run(&self) -> Result<Code, Refusal> {
        match self {
            Self::List { format } => list(*format)?,
            Self::Show { path, format } => show(&Case::load(path)?, *format)?,
            Self::New(new) => new.run()?,
            Self::Suggest(suggest) => suggest.run()?,
            Self::Shrink(shrink) => return shrink.run(),
        }
        Ok(Code::Pass)
    }
}

impl New {
    fn run(&self) -> Result<(), Refusal> {
        let geometry = Geometry::named(&self.geometry)
            .ok_or_else(|| Refusal::Request(format!("no geometry is called `{}`", self.geometry)))?;
        if let Some(path) = &self.output
            && !self.force
            && path.symlink_metadata().is_ok()
        {
            return Err(in_the_way(path));
        }
        let longest = self.seq_lens.iter().copied().max().unwrap_or(1);
        let mut case = cases::new_case(NewCase {
            name: self.name.clone(),
            geometry,
            geometry_name: Some(self.geometry.clone()),
            layers: self.layers,
            seed: self.seed,
            active_batch: self.active_batch.unwrap_or(self.seq_lens.len()),
            seq_lens: self.seq_lens.clone(),
            max_seq: self.max_seq.unwrap_or_else(|| longest.max(1).div_ceil(PAGE).saturating_mul(PAGE)),
            pages: self.pages,
            padding: match self.padding {
                PaddingRows::ReplicateRow0 => Padding::ReplicateRow0,
                PaddingRows::Own => Padding::Own,
            },
            poison: None,
        })?;
        if !self.no_hashes {
            case.inputs_sha256 = Inputs::generate(&case, &InputStore::new())?.hashes();
        }
        for warning in case.warnings() {
            output::stderr(&format!("warning: {}\n", plain(&warning)));
        }
        let text = case.to_yaml();
        let Some(path) = &self.output else { return output::stdout(&text) };
        let write = if self.force { device::write_atomically } else { device::create_atomically };
        match write(path, text.as_bytes()) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(in_the_way(path)),
            Err(error) => Err(Refusal::Write { path: path.clone(), error }),
            Ok(()) => Ok(()),
        }
    }
}

fn in_the_way(path: &std::path::Path) -> Refusal {
    Refusal::Request(format!("{}: is already there; pass --force to replace it", path.display()))
}

/// A suite and its cases.
#[derive(Serialize)]
struct Listing {
    suite: String,
    description: String,
    path: String,
    cases: Vec<Summary>,
}

/// What a case runs.
#[derive(Serialize)]
struct Summary {
    name: String,
    path: String,
    kernel: &'static str,
    geometry: String,
    sizes: Sizes,
    layers: usize,
    max_seq: usize,
    pages: usize,
    rope_theta: f64,
    seed: u64,
    active_batch: usize,
    padding: &'static str,
    policy: &'static str,
    poison: Option<&'static str>,
    source: Option<String>,
    decode_steps: Option<usize>,
    rows: Vec<Row>,
    recipes: std::collections::BTreeMap<&'static str, String>,
    hashed_inputs: usize,
    warnings: Vec<String>,
}

/// A geometry, under the names of a case file.
#[derive(Serialize)]
struct Sizes {
    hidden_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    vocab_size: usize,
    real_vocab_size: usize,
}

/// A row of the batch. A row of a `tokens` case has a prompt's length for context and no slot yet.
#[derive(Serialize)]
struct Row {
    row: usize,
    active: bool,
    context: usize,
    slot: Option<usize>,
    pages: Vec<i32>,
}

impl Summary {
    fn of(case: &Case) -> Self {
        let geometry = &case.geometry;
        let (rows, decode_steps) = match &case.kernel {
            Kernel::DecodeLayer(decode) => (decode_rows(&decode.batch), None),
            Kernel::Tokens(tokens) => {
                let rows = tokens.prompts.iter().zip(&tokens.block_table).enumerate();
                let row = |(row, (prompt, pages)): (usize, (&Vec<usize>, &Vec<i32>))| Row {
                    row,
                    active: true,
                    context: prompt.len(),
                    slot: None,
                    pages: used(pages, prompt.len().saturating_add(tokens.decode_steps)),
                };
                (rows.map(row).collect(), Some(tokens.decode_steps))
            }
        };
        Self {
            name: case.name.clone(),
            path: place(&case.path),
            kernel: case.kernel.kind().name(),
            geometry: case.geometry_name.clone().unwrap_or_else(|| "custom".into()),
            sizes: Sizes {
                hidden_size: geometry.hidden_size,
                num_attention_heads: geometry.num_attention_heads,
                num_key_value_heads: geometry.num_key_value_heads,
                head_dim: geometry.head_dim,
                intermediate_size: geometry.intermediate_size,
                num_hidden_layers: geometry.num_hidden_layers,
                vocab_size: geometry.vocab_size,
                real_vocab_size: geometry.real_vocab_size,
            },
            layers: case.layers,
            max_seq: case.max_seq,
            pages: case.pages,
            rope_theta: case.rope_theta,
            seed: case.seed,
            active_batch: case.active_batch,
            padding: case.padding.name(),
            policy: case.policy.name(),
            poison: case.poison.map(|_| "kv_beyond_context: nan"),
            source: case.device.as_ref().map(|device| {
                let revision = device.kernel_revision.as_ref();
                let kernel = revision.map(|revision| format!(", kernel {revision}")).unwrap_or_default();
                format!("{}{kernel}", device.kind.name())
            }),
            decode_steps,
            rows,
            recipes: case.tensors.iter().map(|(input, recipe)| (input.name(), recipe.to_string())).collect(),
            hashed_inputs: case.inputs_sha256.len(),
            warnings: case.warnings(),
        }
    }

    fn source(&self) -> &str {
        self.source.as_deref().unwrap_or("no outputs")
    }

    /// Context lengths of the active rows, shortened to their range when there are many.
    fn contexts(&self) -> String {
        let lengths: Vec<_> = self.rows.iter().filter(|row| row.active).map(|row| row.context).collect();
        match (lengths.iter().min(), lengths.iter().max()) {
            (Some(least), Some(most)) if lengths.len() > 4 => format!("{least} to {most}"),
            _ => lengths.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
        }
    }
}

fn decode_rows(batch: &reference::Batch) -> Vec<Row> {
    let rows = batch.seq_lens.iter().zip(&batch.slots).zip(&batch.block_table).enumerate();
    let row = |(row, ((&context, &slot), pages)): (usize, ((&usize, &usize), &Vec<i32>))| Row {
        row,
        active: row < batch.active,
        context,
        slot: Some(slot),
        pages: used(pages, context),
    };
    rows.map(row).collect()
}

/// The block-table entries that a context of this length reaches.
fn used(pages: &[i32], context: usize) -> Vec<i32> {
    pages.iter().copied().take(context.div_ceil(PAGE)).collect()
}

fn list(format: Format) -> Result<(), Refusal> {
    let mut listings = Vec::new();
    for path in suites::all()? {
        let suite = Suite::load(&path)?;
        let cases = suite.bundles.iter().map(|bundle| Ok(Summary::of(&Case::load(bundle)?)));
        let cases = cases.collect::<Result<_, Refusal>>()?;
        let path = place(&path);
        listings.push(Listing { suite: suite.name, description: suite.description, path, cases });
    }
    if format == Format::Json {
        return json(&listings);
    }
    let mut out = String::new();
    for listing in listings {
        let _ = writeln!(out, "{}: {}", plain(&listing.suite), plain(&listing.description));
        let rows = listing.cases.iter().map(|case| {
            let active = case.active_batch.to_string();
            [
                case.name.clone(),
                case.kernel.into(),
                case.geometry.clone(),
                active,
                case.contexts(),
                case.source().into(),
            ]
        });
        table(&mut out, ["case", "kernel", "geometry", "active", "contexts", "outputs"], rows);
        out.push('\n');
    }
    output::stdout(&out)
}

fn show(case: &Case, format: Format) -> Result<(), Refusal> {
    let summary = Summary::of(case);
    if format == Format::Json { json(&summary) } else { output::stdout(&human(&summary)) }
}

fn human(case: &Summary) -> String {
    let mut out = String::new();
    let sizes = &case.sizes;
    let mut line = |what: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{what:<10} {}", plain(value));
    };
    line("case", &case.name);
    line("file", &case.path);
    line("kernel", case.kernel);
    line(
        "geometry",
        &format!(
            "{}: hidden {}, {} heads, {} KV heads of {}, intermediate {}, {} of {} layers, vocabulary {} of {}",
            case.geometry,
            sizes.hidden_size,
            sizes.num_attention_heads,
            sizes.num_key_value_heads,
            sizes.head_dim,
            sizes.intermediate_size,
            case.layers,
            sizes.num_hidden_layers,
            sizes.real_vocab_size,
            sizes.vocab_size,
        ),
    );
    line("cache", &format!("{} pages of {PAGE}, contexts up to {}", case.pages, case.max_seq));
    line("seed", &case.seed.to_string());
    line("padding", case.padding);
    line("policy", case.policy);
    if let Some(poison) = case.poison {
        line("poison", poison);
    }
    if let Some(steps) = case.decode_steps {
        line("steps", &steps.to_string());
    }
    line("outputs", case.source());
    line("hashes", &format!("of {} inputs", case.hashed_inputs));
    out.push('\n');
    let context = if case.decode_steps.is_some() { "prompt" } else { "context" };
    let mut alike: Vec<(Vec<usize>, [String; 5])> = Vec::new();
    for row in &case.rows {
        let kind = if row.active { "active" } else { "padding" };
        let slot = row.slot.map_or_else(String::new, |slot| slot.to_string());
        let place = row.slot.map_or_else(String::new, |slot| format!("page {} + {}", slot / PAGE, slot % PAGE));
        let pages = row.pages.iter().map(i32::to_string).collect::<Vec<_>>().join(" ");
        let cells = [kind.into(), row.context.to_string(), slot, place, pages];
        // Replicated padding is one fact, not fifteen lines.
        match alike.last_mut() {
            Some((rows, last)) if *last == cells => rows.push(row.row),
            _ => alike.push((vec![row.row], cells)),
        }
    }
    let rows = alike
        .into_iter()
        .map(|(rows, [kind, context, slot, place, pages])| [ranges(&rows), kind, context, slot, place, pages]);
    table(&mut out, ["row", "kind", context, "slot", "place", "pages"], rows);
    out.push('\n');
    let recipes = case.recipes.iter().map(|(name, recipe)| [(*name).to_owned(), recipe.clone()]);
    table(&mut out, ["input", "recipe"], recipes);
    for warning in &case.warnings {
        let _ = writeln!(out, "\nwarning: {}", plain(warning));
    }
    out
}
