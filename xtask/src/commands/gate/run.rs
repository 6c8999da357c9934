//! `assay gate --run`: a command of the user runs the kernel on each case and its outputs are judged. What a device
//! could not run is unjudged and never an accuracy failure: the log is searched for known device errors.
//! `docs/commands.md` is the protocol.

mod log;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use cases::{CASE_FILE, Case, InputStore, Inputs};
use clap::Args;
use device::{Bundle, CAPTURES_FILE, Captures, INPUTS_FILE, Layout, Reported};
use goldens::report::{CaseReport, Check, Verdict};
use goldens::{Progress as _, Repeats};

use self::log::{errors_in, last_lines, truncated};
use super::Limits;
use crate::process::{self, Ended, Interrupt};
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::place;

/// Longest run of a command, unless the request says another, in seconds.
const TIMEOUT: u64 = 3600;
/// File name of what a command said.
const LOG: &str = "log";

/// The flags.
#[derive(Args)]
pub struct Options {
    /// Run this shell command on each case and judge what it writes, instead of recorded captures: it reads {inputs},
    /// a safetensors file with every tensor the kernel takes, and writes {outputs} in the layout of
    /// captures.safetensors; {case} is the case file and {name} its name (ASSAY_INPUTS, ASSAY_OUTPUTS, ASSAY_CASE and
    /// ASSAY_NAME hold the same). Where the device fails, the case is unjudged
    #[arg(long, value_name = "COMMAND", group = "backend", value_parser = command)]
    run: Option<String>,
    /// Keep what the command wrote and said in this new directory: a bundle and a log for each case
    #[arg(long, value_name = "DIR", requires = "run")]
    keep: Option<PathBuf>,
}

fn command(text: &str) -> Result<String, String> {
    if text.trim().is_empty() { Err("the command is empty".to_owned()) } else { Ok(text.to_owned()) }
}

impl Options {
    /// What runs the cases, when a command is asked for.
    ///
    /// # Errors
    /// Signals cannot be caught; no directory can be made; the one to keep things in holds something.
    pub fn runner(&self, limits: &Limits) -> Result<Option<Runner<'_>>, Refusal> {
        let Some(command) = &self.run else { return Ok(None) };
        if let Some(keep) = &self.keep {
            claim(keep)?;
        }
        let interrupt = Interrupt::catch_while_running()?;
        let temporary = tempfile::Builder::new().prefix("assay-run-").tempdir().map_err(|error| {
            Refusal::Request(format!("no temporary directory for inputs and outputs: {error}; set TMPDIR"))
        })?;
        interrupt.removes(temporary.path().to_path_buf());
        let timeout = limits.timeout(TIMEOUT);
        let (repeat, keep) = (limits.repeat(), self.keep.as_deref());
        Ok(Some(Runner { command, timeout, repeat, keep, interrupt, temporary, folders: BTreeSet::new() }))
    }
}

/// Makes the directory, or sees that nothing is in it.
fn claim(folder: &Path) -> Result<(), Refusal> {
    let write = |error| Refusal::Write { path: folder.to_path_buf(), error };
    fs::create_dir_all(folder).map_err(write)?;
    if fs::read_dir(folder).map_err(write)?.next().is_some() {
        return Err(Refusal::Request(format!(
            "--keep {}: is not empty, and nothing in it is to be mixed up with this run; name a new directory",
            folder.display()
        )));
    }
    Ok(())
}

/// Runs a command on cases.
pub struct Runner<'a> {
    command: &'a str,
    timeout: Duration,
    repeat: u32,
    keep: Option<&'a Path>,
    interrupt: Interrupt,
    temporary: tempfile::TempDir,
    /// Names given to directories of cases.
    folders: BTreeSet<String>,
}

/// Why there is nothing to judge.
struct Unjudged {
    /// What stood in the way: `device` or `run`.
    check: &'static str,
    /// Why, and what to do.
    detail: String,
}

impl Runner<'_> {
    /// Runs the command on a case; `judge` gives the report on what it left.
    ///
    /// # Errors
    /// The case or its inputs are wrong, or what the command wrote is malformed.
    pub fn judge(
        &mut self,
        case: &Case,
        store: &InputStore,
        bar: &Bar,
        judge: impl FnOnce(&Bundle) -> Result<CaseReport, Refusal>,
    ) -> Result<CaseReport, Refusal> {
        let started = Instant::now();
        bar.begin(&case.name);
        bar.step("inputs");
        let generated = Inputs::generate(case, store)?;
        let inputs = self.temporary.path().join(INPUTS_FILE);
        remove(&inputs)?;
        let failed = |path: &Path| {
            let path = path.to_path_buf();
            move |error| Refusal::Write { path, error }
        };
        device::write_inputs(&inputs, case, &generated).map_err(failed(&inputs))?;
        // What is judged is what this command makes, and no recording.
        let case = Case { device: None, final_cache_sha256: [].into(), ..case.clone() };
        let folder = match self.keep {
            Some(keep) => keep.join(self.folder_name(&case.name)),
            None => self.temporary.path().join("case"),
        };
        fs::create_dir_all(&folder).map_err(failed(&folder))?;
        if self.keep.is_some() {
            let file = folder.join(CASE_FILE);
            device::create_atomically(&file, case.to_yaml().as_bytes()).map_err(failed(&file))?;
        }

        let once = Once { runner: self, case: &case, generated: &generated, inputs: &inputs, folder: &folder };
        bar.step(&once.of(1, "running"));
        let mut report = match once.run(1)? {
            Err(Unjudged { check, detail }) => CaseReport::unjudged(&case, check, &detail),
            Ok(captures) => {
                let bundle = Bundle { dir: folder.clone(), case: case.clone(), captures: Some(captures) };
                let mut report = judge(&bundle)?;
                if let (Some(first), true) = (&bundle.captures, self.repeat > 1) {
                    once.repeat(first, &mut report, bar)?;
                }
                report
            }
        };
        if self.keep.is_none() {
            fs::remove_dir_all(&folder).map_err(failed(&folder))?;
        }
        report.path = place(&case.path);
        report.source = format!("of the command `{}`", self.command);
        report.seconds = started.elapsed().as_secs_f64();
        Ok(report)
    }

    /// A directory's name for a case, which may be called anything.
    fn folder_name(&mut self, name: &str) -> String {
        let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
        let name: String = name.chars().map(safe).take(100).collect();
        let name = name.trim_start_matches('.').to_owned();
        let numbered = (1..).map(|n| if n == 1 && !name.is_empty() { name.clone() } else { format!("{name}-{n}") });
        let free = numbered.into_iter().find(|name| !self.folders.contains(name)).unwrap_or(name.clone());
        self.folders.insert(free.clone());
        free
    }
}

/// One case that a command is run on.
struct Once<'a> {
    runner: &'a Runner<'a>,
    case: &'a Case,
    generated: &'a Inputs,
    inputs: &'a Path,
    folder: &'a Path,
}

impl Once<'_> {
    /// Runs the command and reads what it wrote.
    fn run(&self, number: u32) -> Result<Result<Captures, Unjudged>, Refusal> {
        let (outputs, log) = (self.file(CAPTURES_FILE, number), self.file(LOG, number));
        if number > 1 {
            // From the same state: a kernel that works in place may have written into its inputs.
            remove(self.inputs)?;
            device::write_inputs(self.inputs, self.case, self.generated)
                .map_err(|error| Refusal::Write { path: self.inputs.to_path_buf(), error })?;
        }
        let ended = self.start(&outputs, &log)?;
        let status = match ended {
            Ended::Interrupted => {
                if self.runner.keep.is_some() {
                    // Half a case is not worth keeping, and what cannot be removed keeps nobody from ending.
                    let _ = fs::remove_dir_all(self.folder);
                }
                self.runner.interrupt.end();
            }
            Ended::TimedOut => {
                let seconds = self.runner.timeout.as_secs();
                let why = format!("the command took longer than {seconds} s and was ended; --timeout gives it longer");
                return Ok(Err(self.unjudged(&log, why, None)));
            }
            Ended::Exited(status) => status,
        };
        let reported = match errors_in(&log) {
            Ok(reported) => reported,
            Err(error) => {
                let why = format!(
                    "the command ended, and its log {} cannot be read any more ({error}); it has to leave the directory \
                     of {{outputs}} as it is but for that file",
                    log.display()
                );
                return Ok(Err(self.unjudged(&log, why, None)));
            }
        };
        if !status.success() || !reported.is_empty() {
            let ended = if status.success() { "ended well all the same".to_owned() } else { process::words(status) };
            return Ok(Err(self.unjudged(&log, format!("the command {ended}"), Some((&reported, status)))));
        }
        let read = device::read_outputs(&outputs, self.case, self.generated).map_err(|error| {
            let fault = error.fault().map_or_else(|| error.to_string(), ToString::to_string);
            let kept = match self.runner.keep {
                Some(_) => format!("; it is {}", outputs.display()),
                None => "; --keep DIR keeps it to be looked at".to_owned(),
            };
            Refusal::Request(format!(
                "{}: what the command wrote to {{outputs}} cannot be used: {fault}{kept}",
                self.case.path.display()
            ))
        })?;
        let Some(captures) = read else {
            let why = "the command ended well and wrote no outputs; it has to write the file {outputs}".to_owned();
            return Ok(Err(self.unjudged(&log, why, None)));
        };
        if self.runner.keep.is_some() {
            self.settle(&outputs, &captures)?;
        }
        Ok(Ok(captures))
    }

    /// Runs again and again, and adds to the report what the runs say together.
    fn repeat(&self, first: &Captures, report: &mut CaseReport, bar: &Bar) -> Result<(), Refusal> {
        let mut repeats = Repeats::of(first);
        for number in 2..=self.runner.repeat {
            bar.step(&self.of(number, "running"));
            match self.run(number)? {
                Ok(captures) => {
                    repeats.see(&captures);
                    if self.runner.keep.is_none() {
                        // Nobody looks at it again.
                        remove(&self.file(CAPTURES_FILE, number))?;
                        remove(&self.file(LOG, number))?;
                    }
                }
                Err(Unjudged { detail, .. }) => {
                    let detail = format!("run {number} of {}: {detail}", self.runner.repeat);
                    if report.verdict == Verdict::Pass {
                        report.verdict = Verdict::Unjudged;
                        report.coverage.insert(0, detail.clone());
                    }
                    let name = "repeatable".to_owned();
                    report.checks.push(Check { name, verdict: Verdict::Unjudged, detail });
                    return Ok(());
                }
            }
            if repeats.differ() {
                break;
            }
        }
        repeats.add_to(report);
        Ok(())
    }

    fn start(&self, outputs: &Path, log: &Path) -> Result<Ended, Refusal> {
        let text = |path: &Path| {
            let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
            absolute.display().to_string()
        };
        let (inputs, outputs, case) = (text(self.inputs), text(outputs), text(&self.case.path));
        let names = [("inputs", &inputs), ("outputs", &outputs), ("case", &case), ("name", &self.case.name)];
        let line = process::filled(self.runner.command, &names.map(|(name, value)| (name, Some(value.as_str()))));
        let write = |error| Refusal::Write { path: log.to_path_buf(), error };
        let (out, err) = File::create(log).and_then(|file| Ok((file.try_clone()?, file))).map_err(write)?;
        let mut command = process::shell(&line);
        for (name, value) in names {
            command.env(format!("ASSAY_{}", name.to_uppercase()), value);
        }
        process::run(command.stdout(out).stderr(err), Some(self.runner.timeout), &self.runner.interrupt)
            .map_err(|error| Refusal::Request(format!("--run: the shell cannot be started: {error}")))
    }

    /// Why there is nothing to judge: the device's errors first, then how the command ended and what it said last.
    fn unjudged(&self, log: &Path, why: String, found: Option<(&[Reported], ExitStatus)>) -> Unjudged {
        let (reported, status) = found.map_or((&[][..], None), |(reported, status)| (reported, Some(status)));
        let said = match last_lines(log) {
            Some(lines) => format!("; its last lines: {lines}"),
            None => "; it said nothing".to_owned(),
        };
        let kept =
            if self.runner.keep.is_some() { format!("; all of it is in {}", log.display()) } else { String::new() };
        let Some((cause, others)) = reported.split_first() else {
            let hint = status.and_then(truncated).unwrap_or_default();
            return Unjudged { check: "run", detail: format!("{why}{hint}{said}{kept}") };
        };
        let others: Vec<String> = others.iter().map(Reported::name).collect();
        let others = if others.is_empty() { String::new() } else { format!("; also {}", others.join(", ")) };
        Unjudged { check: "device", detail: format!("the device reported {cause}{others}; {why}{said}{kept}") }
    }

    /// Makes what was kept a bundle, where the command wrote it in a form that only a runner may.
    fn settle(&self, outputs: &Path, captures: &Captures) -> Result<(), Refusal> {
        let write = |error| Refusal::Write { path: outputs.to_path_buf(), error };
        if fs::symlink_metadata(outputs).is_ok_and(|found| found.is_symlink()) {
            // What it leads to may change: the bundle holds the data.
            let copy = outputs.with_extension("copied");
            fs::copy(outputs, &copy).and_then(|_| fs::rename(&copy, outputs)).map_err(write)?;
        }
        if Captures::open(outputs, &self.case.geometry, &Layout::of(self.case)).is_ok() {
            return Ok(());
        }
        if outputs.is_dir() {
            fs::rename(outputs, outputs.with_extension("written")).map_err(write)?;
        }
        // A tensor of a wrong type holds no values that could be written: then the file stays what it was.
        match device::write_captures(outputs, captures) {
            Err(error) if matches!(*error.fault, device::CaptureFault::Io(_)) => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// A file of a run; the first run's has the plain name.
    fn file(&self, name: &str, number: u32) -> PathBuf {
        match (number, name.split_once('.')) {
            (1, _) => self.folder.join(name),
            (n, Some((stem, extension))) => self.folder.join(format!("{stem}-{n}.{extension}")),
            (n, None) => self.folder.join(format!("{name}-{n}")),
        }
    }

    fn of(&self, number: u32, what: &str) -> String {
        match self.runner.repeat {
            1 => what.to_owned(),
            all => format!("{what}, {number} of {all}"),
        }
    }
}

fn remove(path: &Path) -> Result<(), Refusal> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Refusal::Write { path: path.to_path_buf(), error })
        }
        _ => Ok(()),
    }
}
