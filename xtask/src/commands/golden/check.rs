//! `assay tokens check`: one golden, judged against a dump or run again.

use std::collections::BTreeSet;
use std::path::PathBuf;

use cases::{Shard, Tokenizer};
use clap::Args;
use goldens::tokens::report::TokensReport;
use goldens::tokens::{self, Dump, Follow, Golden, Reference, Row};
use ndarray::Array2;
use reference::Geometry;
use reference::model::Weights;

use super::{Folder, all};
use crate::commands::show::{Format, json};
use crate::commands::source::{Place, Source};
use crate::exit_codes::Code;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::{output, report};

/// Judge tokens.
#[derive(Args)]
pub struct Check {
    /// A golden's name, or its file
    #[arg(value_name = "NAME-OR-FILE", required_unless_present = "all", conflicts_with = "all")]
    golden: Option<String>,
    /// What the device generated: a bundle, captures.safetensors, JSON, or lines of ids
    #[arg(conflicts_with = "all")]
    dump: Option<PathBuf>,
    /// Judge every accepted golden; without --dumps, run every golden of the model again
    #[arg(long)]
    all: bool,
    /// Directory of dumps, each called as its golden: NAME (a bundle or a file), NAME.json, NAME.safetensors, NAME.txt
    #[arg(long, value_name = "DIR", requires = "all", conflicts_with = "golden")]
    pub dumps: Option<PathBuf>,
    /// Judge the I-th of N parts of the goldens only; every golden goes by its place in the sorted list of names,
    /// modulo N
    #[arg(long, value_name = "I/N", requires = "all", conflicts_with = "golden")]
    pub shard: Option<Shard>,
    /// Also write a JUnit report to this file
    #[arg(long, value_name = "FILE", requires = "all", conflicts_with = "golden")]
    pub junit: Option<PathBuf>,
    // The model that the golden was made from: follows a device that left it at a near tie.
    #[command(flatten)]
    pub place: Place,
    /// A tokenizer.json, or the directory that holds it; default: the model's
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// What the device generated before a change: says which failures are older than it
    #[arg(long, value_name = "DUMP", requires = "dump")]
    before: Option<PathBuf>,
    /// Judge this row of the golden alone
    #[arg(long, value_name = "N", requires = "dump")]
    row: Option<usize>,
    #[command(flatten)]
    pub folder: Folder,
    /// Format on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub format: Format,
    /// Show every step
    #[arg(long, short)]
    pub verbose: bool,
}

/// What the model of a request gives to the check of a golden.
pub struct Follower<'a> {
    /// Its weights.
    pub weights: &'a dyn Weights,
    /// RoPE cosines and sines of the golden's longest row at least.
    pub rope: [Array2<f32>; 2],
    /// Sees what is at work.
    pub bar: &'a Bar,
}

impl<'a> Follower<'a> {
    /// The model run as a golden says.
    pub fn reference<'b>(&'b self, golden: &Golden) -> Reference<'b, &'a dyn Weights> {
        Reference {
            weights: &self.weights,
            rope: self.rope.clone(),
            limits: golden.limits.clone(),
            policy: golden.policy.clone(),
            samples: golden.samples,
            progress: self.bar,
        }
    }
}

impl Check {
    /// Judges and reports.
    ///
    /// # Errors
    /// What is wrong with the request or a file.
    pub fn run(&self) -> Result<Code, Refusal> {
        // The parser asks for one of the two.
        let Some(golden) = self.golden.as_deref().filter(|_| !self.all) else { return all::run(self) };
        let golden = self.folder.store()?.find(golden)?;
        if let Some(row) = self.row.filter(|row| *row >= golden.rows.len()) {
            let (name, rows) = (&golden.name, golden.rows.len());
            let last = rows.saturating_sub(1);
            return Err(Refusal::Request(format!(
                "--row {row}: the golden `{name}` has {rows} {}; name one of 0 to {last}",
                if rows == 1 { "row" } else { "rows" },
            )));
        }
        let dump = self.dump.as_deref().map(Dump::read);
        let before = self.before.as_deref().map(Dump::read).transpose()?;
        let tokenizer = self.tokenizer()?;
        let source = self.place.open()?;
        if let Some(source) = &source {
            same(source, &source.fingerprint()?, &golden)?;
        }
        let weights = source.as_ref().map(Source::weights).transpose()?;
        let bar = Bar::new(1);
        goldens::Progress::begin(&bar, &golden.name);
        let follower = match (&source, &weights) {
            (Some(source), Some(weights)) => {
                Some(Follower { weights: &**weights, rope: source.rope(golden.limits.max_seq_len)?, bar: &bar })
            }
            _ => None,
        };
        let report = match dump {
            Some(Ok(dump)) => {
                dump.check_prompts(&golden, self.row)?;
                let job = tokens::Check {
                    golden: &golden,
                    dump: &dump,
                    row: self.row,
                    before: before.as_ref(),
                    decode: None,
                };
                judge(job, follower.as_ref(), tokenizer.as_ref())?
            }
            Some(Err(error)) => match tokens::without_tokens(&golden, &error) {
                Some(report) => report,
                None => return Err(error.into()),
            },
            None => match &follower {
                Some(follower) => again(&golden, follower)?,
                None => {
                    let words = "name a dump to judge, or the model with --model or --case to run it again";
                    return Err(Refusal::Request(words.into()));
                }
            },
        };
        drop(follower);
        drop(bar);
        match self.format {
            Format::Json => json(&report)?,
            Format::Human => output::stdout(&report::tokens::check(&report, self.verbose))?,
        }
        Ok(report.verdict.into())
    }

    /// The tokenizer of the request, or that of its model.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>, Refusal> {
        Ok(match (&self.tokenizer, &self.place.model) {
            (Some(path), _) => Some(Tokenizer::open(path)?),
            (None, Some(dir)) if Tokenizer::is_in(dir) => Some(Tokenizer::open(dir)?),
            _ => None,
        })
    }
}

/// Judges a dump, with texts where there is a tokenizer.
///
/// # Errors
/// The model cannot follow the device.
pub fn judge(
    job: tokens::Check<'_>,
    follower: Option<&Follower<'_>>,
    tokenizer: Option<&Tokenizer>,
) -> Result<TokensReport, Refusal> {
    let decode = |ids: &[usize]| tokenizer.and_then(|tokenizer| tokenizer.decode(ids).ok());
    let mut reference = follower.map(|follower| follower.reference(job.golden));
    let job = tokens::Check { decode: tokenizer.is_some().then_some(&decode), ..job };
    Ok(tokens::check(&job, reference.as_mut().map(|reference| reference as &mut dyn Follow))?)
}

/// Refuses a model that a golden was not made from. What the golden says of the model beside its fingerprint has to be
/// so as well: sizes, which tell padding ids from tokens, and stop ids, which are in no fingerprint. `found` is the
/// model's fingerprint.
///
/// # Errors
/// They differ, and the message says in what.
pub fn same(source: &Source, found: &str, golden: &Golden) -> Result<(), Refusal> {
    let (of_model, of_golden) = (source.name(), &golden.name);
    if found != golden.model.fingerprint {
        return Err(Refusal::Request(format!(
            "{of_model}: is not the model of the golden `{of_golden}`, which is {}: its fingerprint is {found}, the \
             golden's {}",
            golden.model.name, golden.model.fingerprint
        )));
    }
    let (sizes, expected) = (source.geometry()?, &golden.model.geometry);
    if sizes != *expected {
        return Err(Refusal::Request(format!(
            "{of_model}: its fingerprint is that of the golden `{of_golden}`, but the golden's model.geometry is \
             another one ({}); the golden was changed by hand: restore it or record it again",
            different(&sizes, expected)
        )));
    }
    let each = |ids: &[usize]| ids.iter().copied().collect::<BTreeSet<usize>>();
    let (stops, expected) = (each(source.stop_ids()), each(&golden.limits.stop_ids));
    if stops != expected {
        return Err(Refusal::Request(format!(
            "{of_model}: has the stop ids {stops:?}, and the golden `{of_golden}` was made with {expected:?}; restore \
             those of the model's configuration, or record the golden again"
        )));
    }
    Ok(())
}

/// The sizes that differ, each with the model's value and the golden's.
fn different(model: &Geometry, golden: &Geometry) -> String {
    let sizes = |of: &Geometry| {
        [
            ("hidden_size", of.hidden_size.to_string()),
            ("num_attention_heads", of.num_attention_heads.to_string()),
            ("num_key_value_heads", of.num_key_value_heads.to_string()),
            ("head_dim", of.head_dim.to_string()),
            ("intermediate_size", of.intermediate_size.to_string()),
            ("num_hidden_layers", of.num_hidden_layers.to_string()),
            ("vocab_size", of.vocab_size.to_string()),
            ("real_vocab_size", of.real_vocab_size.to_string()),
            ("rms_norm_eps", format!("{:?}", of.rms_norm_eps)),
        ]
    };
    let both = sizes(model).into_iter().zip(sizes(golden));
    let words = both
        .filter(|(one, other)| one != other)
        .map(|((name, model), (_, golden))| format!("{name}: {model} in the model, {golden} in the golden"));
    words.collect::<Vec<_>>().join("; ")
}

/// A second run of the reference.
///
/// # Errors
/// The model cannot be run so.
pub fn again(golden: &Golden, follower: &Follower<'_>) -> Result<TokensReport, Refusal> {
    let prompts: Vec<Vec<usize>> = golden.rows.iter().map(|row: &Row| row.prompt_ids.clone()).collect();
    let rows = follower.reference(golden).repeat(&prompts)?;
    let repeated = Golden { rows, ..golden.clone() };
    Ok(tokens::check_again(golden, &repeated, "a second run of the reference".into()))
}
