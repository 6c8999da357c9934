//! `assay gate`: judge captured kernel outputs, or what a command or a kernel launched on a device gives, against the contract.

mod live;
mod run;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cases::{Case, InputStore, Inputs, PolicyRequest, Shard};
use clap::{Args, ValueEnum};
use device::Bundle;
use goldens::report::{CaseReport, GateReport, ShardReport};
use goldens::{Job, Only, judge, merge, repeatability};

use crate::cli::MOST_THREADS;
use crate::exit_codes::{Code, ending};
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::{output, report, suites};

/// The request.
#[derive(Args)]
pub struct Gate {
    /// Bundles, case files, or directories searched for them; none: the repository's default suite
    #[arg(value_name = "BUNDLE-OR-CASE-OR-DIRECTORY")]
    paths: Vec<PathBuf>,
    /// Judge a suite: a name (default, full, sensitive) or a suite file
    #[arg(long, value_name = "NAME")]
    suite: Option<String>,
    /// Rounding rules the device is held to: auto, production, rne, or a YAML file {site: rule};
    /// default: what the case says, else auto
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// Format of the report on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
    /// Also write a JUnit report to this file
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Also write a report to look at to this file: one HTML page that needs nothing else
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Threads to use; results do not depend on it
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<NonZeroUsize>,
    /// Look at these captured tensors only, hide the others (`out`: judge from the output alone)
    #[arg(long, value_name = "TENSOR,...", value_delimiter = ',', value_parser = tensor)]
    tensors: Option<Vec<String>>,
    /// Probability that a whole run of right kernels fails all the same
    #[arg(long, value_name = "P", default_value_t = goldens::FALSE_ALARM, value_parser = probability)]
    false_alarm: f64,
    /// Judge the I-th of N parts of the cases only; every case goes by its place in the sorted list of names, modulo N
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Where a case fails, look for its cause: run the reference with known faults until one gives the device's bits
    #[arg(long)]
    explain: bool,
    /// Show every tensor, element and remark, of passing cases too
    #[arg(long, short)]
    verbose: bool,
    #[command(flatten)]
    command: run::Options,
    #[command(flatten)]
    live: live::Live,
    #[command(flatten)]
    limits: Limits,
}

/// How long and how often a command or a kernel is run.
#[derive(Args)]
struct Limits {
    /// Longest wait for one run, which is ended then [default: 3600 for a command, 120 for a kernel]
    #[arg(long, value_name = "SECONDS", requires = "backend",
          value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    timeout: Option<u64>,
    /// Run the command or launch the kernel N times on each case, from the same state; every run must give the same bits
    #[arg(long, value_name = "N", requires = "backend", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeat: Option<u32>,
}

impl Limits {
    /// Runs of each case.
    fn repeat(&self) -> u32 {
        self.repeat.unwrap_or(1)
    }

    /// Longest wait for one run, where the request says none.
    fn timeout(&self, default: u64) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(default))
    }
}

/// Report formats of standard output.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Tables for a person
    Human,
    /// One JSON object
    Json,
    /// A GitHub step summary in Markdown; appended to $GITHUB_STEP_SUMMARY too when that is set
    Github,
}

impl Gate {
    /// Judges and reports.
    ///
    /// # Errors
    /// The first thing about the request or an input that is wrong; no report has been printed then.
    pub fn run(&self) -> Result<Code, Refusal> {
        self.check_outputs()?;
        let files = self.cases();
        self.check_inputs_stay(files.as_deref().unwrap_or_default())?;
        let outcome = files.and_then(|files| self.judge_all(&files));
        let written = match &outcome {
            Ok((report, cases)) => self.write_reports(report, cases),
            Err(refusal) => self.write_reports(&GateReport::refused(&refusal.to_string()), &[]),
        };
        // A refused request has a more useful story to tell than its report files.
        let (report, _) = outcome?;
        // Standard output holds a report or the reason why there is none, for programs one of the two.
        if self.format == Format::Json {
            written?;
            output::stdout(&report::json::render(&report))?;
            return Ok(ending(&report).0);
        }
        let text = match self.format {
            Format::Github => report::github::render(&report),
            _ => report::human::render(&report, self.verbose),
        };
        output::stdout(&text)?;
        written?;
        Ok(ending(&report).0)
    }

    /// The JUnit file, the HTML page, and the step summary where GitHub asks for one.
    fn write_reports(&self, report: &GateReport, cases: &[Case]) -> Result<(), Refusal> {
        let write = |path: &PathBuf, text: std::io::Result<String>| {
            text.and_then(|text| device::write_atomically(path, text.as_bytes()))
                .map_err(|error| Refusal::Write { path: path.clone(), error })
        };
        let page = report::html::Page { report, cases, run: &self.facts() };
        let junit = self.junit.as_ref().map_or(Ok(()), |path| write(path, report::junit::render(report)));
        let html = self.html.as_ref().map_or(Ok(()), |path| write(path, Ok(report::html::render(&page))));
        // One that cannot be written is no reason not to write the other.
        junit.and(html)?;
        step_summary(self.format, report)
    }

    /// Whether it says itself what is to be judged.
    pub fn names_paths(&self) -> bool {
        !self.paths.is_empty()
    }

    /// What a reader of the page needs in order to run it again.
    fn facts(&self) -> report::html::Facts {
        let kernels = reference::kernels::kernels();
        report::html::Facts {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            kernels: kernels.name().to_owned(),
            false_alarm: self.false_alarm,
            command: std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect(),
        }
    }

    /// The files that are asked for besides standard output, each with its flag.
    fn outputs(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let outputs = [("--junit", self.junit.as_deref()), ("--html", self.html.as_deref())];
        outputs.into_iter().filter_map(|(flag, path)| Some((flag, path?)))
    }

    /// A report that cannot be written is better known before the work than after it.
    fn check_outputs(&self) -> Result<(), Refusal> {
        for (flag, path) in self.outputs() {
            check_place(flag, path)?;
        }
        let place = |path: &Path| {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            Some((folder.canonicalize().ok()?, path.file_name()?.to_owned()))
        };
        match (self.junit.as_deref(), self.html.as_deref()) {
            (Some(junit), Some(html)) if place(junit).is_some() && place(junit) == place(html) => {
                Err(Refusal::Request(format!("--html: {} is the file of --junit too; name two", html.display())))
            }
            _ => Ok(()),
        }
    }

    /// A report must not replace what it reports on, nor may the report of a refusal.
    fn check_inputs_stay(&self, files: &[PathBuf]) -> Result<(), Refusal> {
        let named = [&self.policy, &self.suite].into_iter().flatten().map(PathBuf::from);
        let of_case = |file: &PathBuf| {
            let dir = file.parent().unwrap_or(Path::new(""));
            [file.clone(), dir.join(device::CAPTURES_FILE)]
        };
        let inputs: Vec<PathBuf> =
            named.chain(self.paths.iter().cloned()).chain(files.iter().flat_map(of_case)).collect();
        let inputs = [inputs, self.live.binaries(files)].concat();
        for (flag, output) in self.outputs() {
            let Ok(output) = output.canonicalize() else { continue };
            if let Some(file) = inputs.iter().find(|file| file.canonicalize().is_ok_and(|file| file == output)) {
                return Err(Refusal::Request(format!("{flag}: {} is an input of this run", file.display())));
            }
        }
        Ok(())
    }

    /// Threads asked for.
    pub fn threads(&self) -> Option<NonZeroUsize> {
        self.threads
    }

    fn judge_all(&self, files: &[PathBuf]) -> Result<(GateReport, Vec<Case>), Refusal> {
        let policy = self.policy.as_deref().map(PolicyRequest::from_flag).transpose()?;
        let only = self.tensors.as_deref().map(only).transpose()?;
        let mut files = files.to_vec();
        let shard = self.shard.map(|shard| take(shard, &mut files)).transpose()?;
        if let Some(runner) = self.command.runner(&self.limits)? {
            let (reports, cases) = self.run_all(runner, &files, policy.as_ref(), only.as_ref())?;
            return Ok((GateReport { shard, ..GateReport::new(reports) }, cases));
        }
        if let Some(device) = self.live.device() {
            let (reports, cases) = self.launch_all(device, &files, policy.as_ref(), only.as_ref())?;
            return Ok((GateReport { shard, ..GateReport::new(reports) }, cases));
        }
        // Reading is cheap and judging is not: whatever is malformed is refused before anything runs.
        let bundles = files.iter().map(|path| Bundle::open(path)).collect::<Result<Vec<_>, _>>()?;
        let (store, bar) = (InputStore::new(), Bar::new(bundles.len()));
        let mut reports = Vec::new();
        for bundle in &bundles {
            reports.push(self.judge_one(bundle, policy.as_ref(), only.as_ref(), &store, &bar)?);
            bar.done();
        }
        repeatability(&bundles, &mut reports);
        let report = GateReport { shard, ..GateReport::new(reports) };
        Ok((report, bundles.into_iter().map(|bundle| bundle.case).collect()))
    }

    /// Runs a command on every case and judges what it leaves.
    fn run_all(
        &self,
        mut runner: run::Runner<'_>,
        files: &[PathBuf],
        policy: Option<&PolicyRequest>,
        only: Option<&Only>,
    ) -> Result<(Vec<CaseReport>, Vec<Case>), Refusal> {
        let cases = files.iter().map(|path| Case::load(path)).collect::<Result<Vec<_>, _>>()?;
        let (store, bar) = (InputStore::new(), Bar::new(cases.len()));
        let mut reports = Vec::new();
        for case in &cases {
            let judge = |bundle: &Bundle| self.judge_one(bundle, policy, only, &store, &bar);
            reports.push(runner.judge(case, &store, &bar, judge)?);
            bar.done();
        }
        Ok((reports, cases))
    }

    fn judge_one(
        &self,
        bundle: &Bundle,
        policy: Option<&PolicyRequest>,
        only: Option<&Only>,
        store: &InputStore,
        bar: &Bar,
    ) -> Result<CaseReport, Refusal> {
        let started = Instant::now();
        let inputs = Inputs::generate(&bundle.case, store)?;
        let policy = policy.unwrap_or(&bundle.case.policy);
        let job = Job {
            only,
            false_alarm: self.false_alarm,
            explain: self.explain,
            maps: self.html.is_some(),
            ..Job::new(bundle, &inputs, policy)
        };
        let refused = |error| Refusal::Judge { case: bundle.case.path.clone(), error: Box::new(error) };
        let mut report = judge(&job, bar).map_err(refused)?;
        report.path = report::text::place(&bundle.case.path);
        report.seconds = started.elapsed().as_secs_f64();
        if let (PolicyRequest::Custom(_), Some(file)) = (policy, &self.policy) {
            report.policy.asked.clone_from(file);
        }
        Ok(report)
    }

    /// The case files that the request names.
    fn cases(&self) -> Result<Vec<PathBuf>, Refusal> {
        let suite = self.suite.as_deref().or_else(|| self.paths.is_empty().then_some("default"));
        suites::files(suite, &self.paths)
    }
}

/// A report that cannot be written is better known before the work than after it.
///
/// # Errors
/// There is no such directory, or the file is one.
pub fn check_place(flag: &str, path: &Path) -> Result<(), Refusal> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Err(Refusal::Request(format!("{flag}: {} is not a directory; make it first", folder.display())));
    }
    if path.is_dir() || path.file_name().is_none() {
        return Err(Refusal::Request(format!("{flag}: is a directory; name a file in it")));
    }
    Ok(())
}

/// Appends the step summary where GitHub asks for one.
///
/// # Errors
/// The file cannot be written.
pub fn step_summary(format: Format, report: &GateReport) -> Result<(), Refusal> {
    let summary = std::env::var_os("GITHUB_STEP_SUMMARY").filter(|path| !path.is_empty());
    match summary.filter(|_| format == Format::Github) {
        Some(path) => append(Path::new(&path), &report::github::render(report)),
        None => Ok(()),
    }
}

/// Keeps the cases of one shard. Every case file is read for its name, so that all machines split the same list.
fn take(shard: Shard, paths: &mut Vec<PathBuf>) -> Result<ShardReport, Refusal> {
    let named = |path: PathBuf| Case::load(&path).map(|case| (case.name, path));
    let mut cases = paths.drain(..).map(named).collect::<Result<Vec<_>, _>>()?;
    let report = merge::take(shard, &mut cases, |(name, _)| name);
    paths.extend(cases.into_iter().map(|(_, path)| path));
    Ok(report)
}

fn append(path: &Path, text: &str) -> Result<(), Refusal> {
    let written =
        OpenOptions::new().append(true).create(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| Refusal::Write { path: path.to_path_buf(), error })
}

fn threads(text: &str) -> Result<NonZeroUsize, String> {
    match text.parse::<NonZeroUsize>() {
        Ok(threads) if threads.get() <= MOST_THREADS => Ok(threads),
        _ => Err(format!("expected a number from 1 to {MOST_THREADS}")),
    }
}

/// A false-alarm probability.
pub fn probability(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value < 1.0 => Ok(value),
        _ => Err("expected a probability between 0 and 1, both excluded".into()),
    }
}

/// A tensor by its name in a capture.
pub fn tensor(name: &str) -> Result<String, String> {
    Only::default().insert(name).map(|()| name.to_owned())
}

/// The tensors that are looked at.
pub fn only(names: &[String]) -> Result<Only, Refusal> {
    let mut only = Only::default();
    for name in names {
        only.insert(name).map_err(|error| Refusal::Request(format!("--tensors: {name}: {error}")))?;
    }
    Ok(only)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_refused() {
        for text in ["0", "-1", "1025", "many", "18446744073709551616"] {
            assert!(threads(text).is_err(), "{text}");
        }
        for text in ["0", "1", "-0.1", "NaN", "inf", ""] {
            assert!(probability(text).is_err(), "{text}");
        }
        assert_eq!(probability("1e-6"), Ok(1e-6));
    }

    #[test]
    fn tensors_go_by_the_names_of_captures() {
        for name in ["out", "k_written_rows", "v_written_values", "token_ids", "prefill_hidden"] {
            assert_eq!(tensor(name), Ok(name.to_owned()));
        }
        assert!(tensor("outt").unwrap_err().contains("attn_out"));
    }
}
