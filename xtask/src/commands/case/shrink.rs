//! `assay case shrink`: the smallest case that still fails at the same first divergence.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cases::{CASE_FILE, Case, InputStore, Inputs};
use clap::Args;
use device::Bundle;
use goldens::report::Verdict;
use goldens::shrink::{Answer, Outcome, Shrunk, Step, planted, shrink};
use goldens::{Job, Progress as _, judge};
use reference::Deviation;
use serde::Serialize;

use crate::commands::show::{Format, json};
use crate::exit_codes::Code;
use crate::output;
use crate::process::{self, Ended, Interrupt};
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::plain;

/// The request.
#[derive(Args)]
#[command(
    after_help = "Exit codes: 0 a smaller case was found, or none is smaller; 2 the request or the case is wrong, or \
    it does not fail; 125 the case as it is could not be judged"
)]
pub struct Shrink {
    /// The failing decode-layer case, or its bundle; captures are not looked at
    #[arg(value_name = "CASE")]
    case: PathBuf,
    /// The failing device: the reference with this fault of the catalogue
    #[arg(long, value_name = "FAULT", conflicts_with = "run", required_unless_present = "run")]
    fault: Option<String>,
    /// The failing device: a shell command that runs the kernel on {case} and leaves captures.safetensors in {out}
    /// (ASSAY_CASE and ASSAY_OUT hold the same); where it fails, that case could not be judged
    #[arg(long, value_name = "COMMAND")]
    run: Option<String>,
    /// Time limit of each run of the command
    #[arg(long, value_name = "SECONDS", default_value_t = 3600,
          value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    timeout: u64,
    /// Most cases tried
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    tries: u32,
    /// Where to write the case
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Replace the output file when it is there
    #[arg(long)]
    force: bool,
    /// Format on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
}

/// The answer in JSON.
#[derive(Serialize)]
struct Found<'a> {
    case: &'a str,
    output: String,
    first_divergence: &'a str,
    steps: &'a [Step],
    tries: u32,
    unjudged: u32,
    cut_short: bool,
}

impl Shrink {
    /// Shrinks and writes.
    ///
    /// # Errors
    /// What is wrong with the request, the case or the command.
    pub fn run(&self) -> Result<Code, Refusal> {
        let case = Case::load(&self.case)?;
        if case.batch().is_none() {
            return Err(Refusal::Request(format!(
                "{}: a {} case cannot be made smaller, only a decode layer's",
                case.path.display(),
                case.kernel.kind().name()
            )));
        }
        if !self.force && self.output.symlink_metadata().is_ok() {
            return Err(super::in_the_way(&self.output));
        }
        let bar = Bar::new(self.tries as usize);
        // Most inputs stay as they are from one try to the next.
        let store = InputStore::new();
        let outcome = match (&self.fault, &self.run) {
            (Some(fault), _) => {
                let fault = exactly(fault)?;
                shrink(&case, self.tries, |what, case| {
                    bar.begin(what);
                    let answer = planted(case, &fault, &store).map_err(refused(case));
                    bar.done();
                    answer
                })?
            }
            (None, Some(run)) => {
                let device =
                    Command { text: run, timeout: Duration::from_secs(self.timeout), interrupt: Interrupt::catch()? };
                shrink(&case, self.tries, |what, case| {
                    bar.begin(what);
                    let answer = device.answer(case, &store);
                    bar.done();
                    answer
                })?
            }
            (None, None) => return Err(Refusal::Request("name the failing device: --fault or --run".to_owned())),
        };
        drop(bar);
        match outcome {
            Outcome::Shrunk(shrunk) => self.write(&case, *shrunk),
            Outcome::NoFailure(Answer::Unjudged(why)) => {
                output::stdout(&format!("UNJUDGED {}: {}\n", plain(&case.name), plain(&why)))?;
                Ok(Code::Unjudged)
            }
            Outcome::NoFailure(_) => Err(Refusal::Request(format!(
                "{}: this device passes the case, so that there is no failure to keep; \
                 `assay case suggest` finds cases that show a fault",
                case.path.display()
            ))),
        }
    }

    fn write(&self, whole: &Case, mut shrunk: Shrunk) -> Result<Code, Refusal> {
        shrunk.case.inputs_sha256 = Inputs::generate(&shrunk.case, &InputStore::new())?.hashes();
        let text = shrunk.case.to_yaml();
        let write = if self.force { device::write_atomically } else { device::create_atomically };
        write(&self.output, text.as_bytes()).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => super::in_the_way(&self.output),
            _ => Refusal::Write { path: self.output.clone(), error },
        })?;
        let output = self.output.display().to_string();
        let found = Found {
            case: &whole.name,
            output,
            first_divergence: &shrunk.at,
            steps: &shrunk.steps,
            tries: shrunk.tries,
            unjudged: shrunk.unjudged,
            cut_short: shrunk.cut_short,
        };
        match self.format {
            Format::Json => json(&found)?,
            Format::Human => output::stdout(&human(&found))?,
        }
        Ok(Code::Pass)
    }
}

fn human(found: &Found<'_>) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ =
        writeln!(out, "{} still fails at {} after {} reductions:", plain(found.case), plain(found.first_divergence), {
            found.steps.len()
        });
    for step in found.steps {
        let _ = writeln!(out, "  {}", plain(&step.what));
    }
    let unjudged = match found.unjudged {
        0 => String::new(),
        n => format!(", {n} of which could not be judged"),
    };
    let _ = writeln!(out, "{} cases tried{unjudged}; written to {}", found.tries, plain(&found.output));
    if found.cut_short {
        let _ = writeln!(out, "the limit of tries was reached; more (--tries) may make it smaller");
    }
    out
}

/// The fault with just this name.
fn exactly(name: &str) -> Result<Deviation, Refusal> {
    let all = super::suggest::named(&[name.to_owned()])?;
    let names: Vec<String> = all.iter().map(|fault| fault.id.clone()).collect();
    all.into_iter().find(|fault| fault.id == name).ok_or_else(|| {
        Refusal::Request(format!("--fault: no fault is called `{name}`; names that begin so: {}", names.join(", ")))
    })
}

fn refused(case: &Case) -> impl Fn(goldens::JudgeError) -> Refusal + use<> {
    let path = case.path.clone();
    move |error| Refusal::Judge { case: path.clone(), error: Box::new(error) }
}

/// A device behind a shell command.
struct Command<'a> {
    text: &'a str,
    timeout: Duration,
    interrupt: Interrupt,
}

impl Command<'_> {
    /// Runs the command on a case and judges what it left.
    fn answer(&self, case: &Case, store: &InputStore) -> Result<Answer, Refusal> {
        let temporary = |error| Refusal::Request(format!("no temporary directory can be made: {error}"));
        let dir = tempfile::tempdir().map_err(temporary)?;
        let out = dir.path().join("out");
        fs::create_dir(&out).map_err(temporary)?;
        // Beside its outputs the case is a bundle.
        let file = out.join(CASE_FILE);
        let write = |path: &Path| {
            let failed = |error| Refusal::Write { path: path.to_owned(), error };
            device::write_atomically(path, case.to_yaml().as_bytes()).map_err(failed)
        };
        write(&file)?;
        if let Some(why) = self.shell(&file, &out)? {
            return Ok(Answer::Unjudged(format!("the command {why}")));
        }
        // What the command made of the case file does not count.
        write(&file)?;
        let bundle = match Bundle::open(&out) {
            Ok(bundle) if bundle.captures.is_some() => bundle,
            Ok(_) => return Ok(Answer::Unjudged(format!("the command left no {} in {{out}}", device::CAPTURES_FILE))),
            Err(error) => return Ok(Answer::Unjudged(error.to_string())),
        };
        let inputs = Inputs::generate(&bundle.case, store)?;
        let policy = bundle.case.policy.clone();
        let report = judge(&Job::new(&bundle, &inputs, &policy), &()).map_err(refused(case))?;
        Ok(match report.verdict {
            Verdict::Pass => Answer::Passes,
            Verdict::Unjudged | Verdict::Error => {
                Answer::Unjudged("the gate could not judge what the command left".to_owned())
            }
            Verdict::Fail => Answer::Fails(report.first_divergence.unwrap_or_else(|| "a contract check".to_owned())),
        })
    }

    /// Why the command gave nothing to judge.
    fn shell(&self, case: &Path, out: &Path) -> Result<Option<String>, Refusal> {
        let (case, out) = (case.display().to_string(), out.display().to_string());
        let text = process::filled(self.text, &[("case", Some(&case)), ("out", Some(&out))]);
        let mut command = process::shell(&text);
        // Standard output holds the answer.
        command.env("ASSAY_CASE", &case).env("ASSAY_OUT", &out).stdout(io::stderr());
        match process::run(&mut command, Some(self.timeout), &self.interrupt) {
            Ok(Ended::Exited(status)) if status.success() => Ok(None),
            Ok(Ended::Exited(status)) => Ok(Some(process::words(status))),
            Ok(Ended::TimedOut) => Ok(Some(format!("took longer than {} s", self.timeout.as_secs()))),
            Ok(Ended::Interrupted) => Err(Refusal::Request("interrupted; nothing was written".to_owned())),
            Err(error) => Err(Refusal::Request(format!("the shell cannot be started: {error}"))),
        }
    }
}
