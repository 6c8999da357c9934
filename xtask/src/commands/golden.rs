//! `assay tokens record|check|review|accept|list`: goldens made, kept and checked against. What they mean is in
//! `goldens::tokens`; this finds the files and shows what came back.

mod all;
mod check;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use goldens::tokens::{self, Golden, Model, Recorded, Reference, State, Store};

use self::check::Check;
use super::prompts::Prompts;
use super::show::{Format, json, table};
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
    /// Judge a device's tokens against a golden, or those of a directory against all (--all); without a dump, run the
    /// reference again and compare it bit for bit
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
