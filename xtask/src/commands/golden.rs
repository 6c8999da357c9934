//! `assay tokens record|check|review|accept|list`: goldens made, kept and checked against. What they mean is in
//! `goldens::tokens`; this finds the files and shows what came back.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use cases::Tokenizer;
use clap::{Args, Subcommand};
use goldens::tokens::{self, Dump, Follow, Golden, Model, Recorded, Reference, Row, State, Store};
use reference::Geometry;
use reference::model::Weights;

use super::prompts::Prompts;
use super::show::{Format, json, table};
use super::source::{Place, Source};
use crate::exit_codes::Code;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::{place, plain};
use crate::{output, report, suites};

/// What to do with goldens.
#[derive(Subcommand)]
pub enum Command {
    /// Make a golden from the reference; it is pending until it is accepted
    Record(Box<Record>),
    /// Judge a device's tokens against a golden; without a dump, run the reference again and compare it bit for bit
    Check(Box<Check>),
    /// Show what pending goldens would change; exits 1 while any is pending
    Review {
        /// Look at this golden alone
        name: Option<String>,
        #[command(flatten)]
        folder: Folder,
        /// Format on standard output
        #[arg(long, value_enum, default_value_t = Format::Human)]
        format: Format,
    },
    /// Make a pending golden the standard
    Accept {
        /// The golden
        name: String,
        /// Why; it is kept in the golden
        #[arg(long, value_name = "TEXT")]
        reason: String,
        #[command(flatten)]
        folder: Folder,
    },
    /// List accepted and pending goldens, and files that are neither
    List {
        #[command(flatten)]
        folder: Folder,
        /// Format on standard output
        #[arg(long, value_enum, default_value_t = Format::Human)]
        format: Format,
    },
}

/// Where goldens are.
#[derive(Args)]
pub struct Folder {
    /// Directory of the goldens; default: goldens/tokens of the repository
    #[arg(long, value_name = "DIR")]
    goldens: Option<PathBuf>,
}

impl Folder {
    fn store(&self) -> Result<Store, Refusal> {
        let dir = match &self.goldens {
            Some(dir) => dir.clone(),
            None => {
                suites::folder().as_deref().and_then(Path::parent).map(|goldens| goldens.join("tokens")).ok_or_else(
                    || Refusal::Request("no goldens/tokens here or above; name a directory with --goldens".into()),
                )?
            }
        };
        // An empty variable means what an unset one means.
        let ci = std::env::var_os("CI").is_some_and(|value| !value.is_empty());
        Ok(Store::new(&dir, ci))
    }
}

/// Make a golden.
#[derive(Args)]
pub struct Record {
    /// Name of the golden
    name: String,
    #[command(flatten)]
    prompts: Prompts,
    /// Sampled devices that show how far permitted freedoms move each margin; each costs as much as the run itself
    #[arg(long, value_name = "N", default_value_t = tokens::spread::SAMPLES,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(tokens::spread::MOST_SAMPLES)))]
    samples: u32,
    #[command(flatten)]
    folder: Folder,
}

/// Judge tokens.
#[derive(Args)]
pub struct Check {
    /// A golden's name, or its file
    #[arg(value_name = "NAME-OR-FILE")]
    golden: String,
    /// What the device generated: a bundle, captures.safetensors, JSON, or lines of ids
    dump: Option<PathBuf>,
    // The model that the golden was made from: follows a device that left it at a near tie.
    #[command(flatten)]
    place: Place,
    /// A tokenizer.json, or the directory that holds it; default: the model's
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// What the device generated before a change: says which failures are older than it
    #[arg(long, value_name = "DUMP", requires = "dump")]
    before: Option<PathBuf>,
    /// Judge this row of the golden alone
    #[arg(long, value_name = "N", requires = "dump")]
    row: Option<usize>,
    #[command(flatten)]
    folder: Folder,
    /// Format on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
    /// Show every step
    #[arg(long, short)]
    verbose: bool,
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request or a file.
    pub fn run(&self) -> Result<Code, Refusal> {
        match self {
            Self::Record(record) => record.run(),
            Self::Check(check) => check.run(),
            Self::Review { name, folder, format } => review(&folder.store()?, name.as_deref(), *format),
            Self::Accept { name, reason, folder } => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
                let path = folder.store()?.accept(name, reason, &tokens::date(now))?;
                output::stdout(&format!("accepted: {}\n", plain(&place(&path))))?;
                Ok(Code::Pass)
            }
            Self::List { folder, format } => list(&folder.store()?, *format),
        }
    }
}

impl Record {
    fn run(&self) -> Result<Code, Refusal> {
        let store = self.folder.store()?;
        store.check_writable(&self.name)?;
        let opened = self.prompts.open()?;
        store.prepare(&self.name)?;
        let weights = opened.source.weights()?;
        let bar = Bar::new(1);
        goldens::Progress::begin(&bar, &self.name);
        let reference = Reference {
            weights: &&*weights,
            rope: opened.source.rope(opened.positions())?,
            limits: opened.limits.clone(),
            policy: opened.policy.clone(),
            samples: self.samples,
            progress: &bar,
        };
        let mut rows = reference.record(&opened.prompts)?;
        drop(bar);
        if let Some(tokenizer) = &opened.tokenizer {
            for row in &mut rows {
                row.prompt = Some(tokenizer.decode(&row.prompt_ids)?);
                row.text = Some(tokenizer.decode(&row.token_ids())?);
            }
        }
        let golden = Golden {
            name: self.name.clone(),
            tool: concat!("assay ", env!("CARGO_PKG_VERSION")).to_owned(),
            accepted: None,
            model: Model {
                name: opened.source.name(),
                fingerprint: opened.source.fingerprint()?,
                geometry: opened.source.geometry()?,
            },
            policy: opened.policy.clone(),
            limits: opened.limits.clone(),
            samples: self.samples,
            false_alarm: tokens::spread::FALSE_ALARM,
            rows,
        };
        let standing = store.standing(&self.name)?;
        match store.record(&golden)? {
            Recorded::Unchanged => {
                output::stdout(&format!("{}: says what is accepted already; nothing is pending\n", self.name))?;
            }
            Recorded::Pending(path) => {
                let review = tokens::review_standing(&standing, &golden);
                let folder = self.folder.goldens.as_ref().map(|dir| format!(" --goldens {}", dir.display()));
                let next = format!(
                    "pending: {}\naccept it with: tokens accept {} --reason TEXT{}\n",
                    plain(&place(&path)),
                    self.name,
                    plain(&folder.unwrap_or_default())
                );
                output::stdout(&(report::tokens::review(&review) + &next))?;
            }
        }
        Ok(Code::Pass)
    }
}

impl Check {
    fn run(&self) -> Result<Code, Refusal> {
        let golden = self.folder.store()?.find(&self.golden)?;
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
        let tokenizer = match (&self.tokenizer, &self.place.model) {
            (Some(path), _) => Some(Tokenizer::open(path)?),
            (None, Some(dir)) if Tokenizer::is_in(dir) => Some(Tokenizer::open(dir)?),
            _ => None,
        };
        let source = self.place.open()?;
        if let Some(source) = &source {
            same(source, &golden)?;
        }
        let weights = source.as_ref().map(Source::weights).transpose()?;
        let weights: Option<&dyn Weights> = weights.as_deref();
        let bar = Bar::new(1);
        goldens::Progress::begin(&bar, &golden.name);
        let mut reference = match (&source, &weights) {
            (Some(source), Some(weights)) => Some(Reference {
                weights,
                rope: source.rope(golden.limits.max_seq_len)?,
                limits: golden.limits.clone(),
                policy: golden.policy.clone(),
                samples: golden.samples,
                progress: &bar,
            }),
            _ => None,
        };
        let report = match dump {
            Some(Ok(dump)) => {
                dump.check_prompts(&golden, self.row)?;
                let decode = |ids: &[usize]| tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(ids).ok());
                let job = tokens::Check {
                    golden: &golden,
                    dump: &dump,
                    row: self.row,
                    before: before.as_ref(),
                    decode: tokenizer.is_some().then_some(&decode),
                };
                tokens::check(&job, reference.as_mut().map(|reference| reference as &mut dyn Follow))?
            }
            Some(Err(error)) => match tokens::without_tokens(&golden, &error) {
                Some(report) => report,
                None => return Err(error.into()),
            },
            None => again(&golden, reference.as_ref())?,
        };
        drop(reference);
        drop(bar);
        match self.format {
            Format::Json => json(&report)?,
            Format::Human => output::stdout(&report::tokens::check(&report, self.verbose))?,
        }
        Ok(report.verdict.into())
    }
}

/// Refuses a model that a golden was not made from. What the golden says of the model beside its fingerprint has to be
/// so as well: sizes, which tell padding ids from tokens, and stop ids, which are in no fingerprint.
fn same(source: &Source, golden: &Golden) -> Result<(), Refusal> {
    let found = source.fingerprint()?;
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
fn again(
    golden: &Golden,
    reference: Option<&Reference<'_, &dyn Weights>>,
) -> Result<tokens::report::TokensReport, Refusal> {
    let Some(reference) = reference else {
        return Err(Refusal::Request(
            "name a dump to judge, or the model with --model or --case to run it again".into(),
        ));
    };
    let prompts: Vec<Vec<usize>> = golden.rows.iter().map(|row: &Row| row.prompt_ids.clone()).collect();
    let rows = reference.repeat(&prompts)?;
    let repeated = Golden { rows, ..golden.clone() };
    Ok(tokens::check_again(golden, &repeated, "a second run of the reference".into()))
}

fn review(store: &Store, name: Option<&str>, format: Format) -> Result<Code, Refusal> {
    let mut reviews = Vec::new();
    for pending in store.proposals(name)? {
        reviews.push(tokens::review_standing(&store.standing(&pending.name)?, &pending));
    }
    match format {
        Format::Json => json(&reviews)?,
        Format::Human if reviews.is_empty() => output::stdout("nothing is pending\n")?,
        Format::Human => {
            let text: Vec<String> = reviews.iter().map(report::tokens::review).collect();
            output::stdout(&text.join("\n"))?;
        }
    }
    Ok(if reviews.is_empty() { Code::Pass } else { Code::Failure })
}

fn list(store: &Store, format: Format) -> Result<Code, Refusal> {
    let entries = store.list()?;
    if format == Format::Json {
        json(&entries)?;
    } else if entries.is_empty() {
        output::stdout("no goldens\n")?;
    } else {
        let state = |state| match state {
            State::Accepted => "accepted",
            State::Pending => "pending",
            State::Orphan => "orphan",
        };
        let mut out = String::new();
        let rows = entries.into_iter().map(|entry| [entry.name, state(entry.state).to_owned(), entry.detail]);
        table(&mut out, ["name", "state", "what"], rows);
        output::stdout(&out)?;
    }
    Ok(Code::Pass)
}
