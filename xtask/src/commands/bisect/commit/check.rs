//! One commit: built once, run several times, each bundle judged by this same program in a process of its own, so that
//! whatever a kernel leaves behind ends no search.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use cases::CASE_FILE;
use goldens::Progress as _;
use goldens::commits::{Decision, Mark, Run, Tried, decide};
use goldens::report::{CaseReport, GateReport, Verdict};

use super::worktree::Worktree;
use super::{at, git};
use crate::process::{self, Ended, Interrupt};
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::summary;
use crate::report::text::short;

/// Why a search ends before it has an answer.
pub enum Stop {
    /// The request or the repository.
    Refused(Refusal),
    /// A malformed bundle.
    Malformed(String),
    /// Somebody wants it to end.
    Interrupted,
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// Tries commits.
pub struct Checker<'a> {
    pub build: Option<&'a str>,
    pub capture: &'a str,
    pub case: Option<&'a Path>,
    pub gate: &'a [OsString],
    pub timeout: Duration,
    pub repeat: usize,
    pub skip_malformed: bool,
    pub clean: bool,
    pub logs: &'a Path,
    pub tree: &'a Worktree,
    pub interrupt: &'a Interrupt,
    pub bar: &'a Bar,
    /// What was tried so far.
    pub tried: Vec<Tried>,
}

/// What was judged, or why it could not be.
type Judged = Result<Run, Stop>;

impl Checker<'_> {
    /// Tries a commit. What it showed is added to what was tried; so is a commit that ends the search.
    ///
    /// # Errors
    /// Git or the file system refuses, the bundle is malformed, or somebody wants it to end.
    pub fn check(&mut self, hash: &str) -> Result<Mark, Stop> {
        if self.interrupt.raised() {
            return Err(Stop::Interrupted);
        }
        let started = Instant::now();
        let git = self.tree.git();
        // Forced: what a build changed or left must not keep the next commit from being checked out.
        git.text(&["checkout", "--quiet", "--force", "--detach", hash, "--"])?;
        if self.clean {
            git.text(&["clean", "-ffdxq"])?;
        }
        let commit = git.describe(hash)?;
        let path = self.logs.join(format!("{hash}.log"));
        let mut log = Log::create(&path)?;
        log.line(&format!("commit {hash}: {}", commit.subject))?;
        self.bar.begin(&format!("{} {}", short(hash), commit.subject));
        let mut tried = Tried {
            commit,
            verdict: Mark::Skip,
            flaky: false,
            reason: None,
            runs: Vec::new(),
            log: path.display().to_string(),
            seconds: 0.0,
        };
        let result = self.runs(hash, &mut log, &mut tried);
        tried.seconds = started.elapsed().as_secs_f64();
        self.bar.done();
        let verdict = tried.verdict;
        match result {
            Ok(()) => {
                let why = tried.reason.as_deref().map(|why| format!(" ({why})")).unwrap_or_default();
                log.line(&format!("{}{why}", verdict.name()))?;
                self.tried.push(tried);
                Ok(verdict)
            }
            Err(stop) => {
                if let Stop::Malformed(message) = &stop {
                    tried.reason = Some(message.clone());
                    self.tried.push(tried);
                }
                Err(stop)
            }
        }
    }

    fn runs(&self, hash: &str, log: &mut Log<'_>, tried: &mut Tried) -> Result<(), Stop> {
        if let Some(build) = self.build {
            self.bar.step("build");
            if let Some(why) = self.shell(build, hash, None, log)? {
                tried.reason = Some(format!("does not build: the build command {why}"));
                return Ok(());
            }
        }
        loop {
            match decide(&tried.runs, self.repeat) {
                Decision::Done { verdict, flaky, reason } => {
                    (tried.verdict, tried.flaky, tried.reason) = (verdict, flaky, reason);
                    return Ok(());
                }
                Decision::Again => tried.runs.push(self.once(hash, tried.runs.len() + 1, log)?),
            }
        }
    }

    /// Runs the kernel once and judges what it left.
    fn once(&self, hash: &str, number: usize, log: &mut Log<'_>) -> Judged {
        let out = self.tree.beside("out");
        empty(&out)?;
        self.bar.step(&format!("capture, run {number}"));
        if let Some(why) = self.shell(self.capture, hash, Some((&out, number)), log)? {
            return Ok(skip(format!("the capture command {why}")));
        }
        let left = |name: &str| out.join(name).symlink_metadata().is_ok();
        if let Some(case) = self.case {
            if !left(device::CAPTURES_FILE) {
                return Ok(skip(format!("the capture command left no {} in {{out}}", device::CAPTURES_FILE)));
            }
            let bytes = fs::read(case).map_err(|error| Refusal::Request(format!("{}: {error}", at(case))))?;
            let copy = out.join(CASE_FILE);
            cases::write_atomically(&copy, &bytes).map_err(|error| Refusal::Write { path: copy, error })?;
        } else if fs::read_dir(&out).is_ok_and(|mut entries| entries.next().is_none()) {
            return Ok(skip("the capture command left nothing in {out}".to_owned()));
        }
        self.bar.step(&format!("judge, run {number}"));
        self.judge(&out, hash, number, log)
    }

    /// Judges a bundle.
    fn judge(&self, out: &Path, hash: &str, number: usize, log: &mut Log<'_>) -> Judged {
        let program = std::env::current_exe()
            .map_err(|error| Refusal::Request(format!("this program's own file cannot be found: {error}")))?;
        let answer = self.tree.beside("gate.json");
        let file = File::create(&answer).map_err(|error| Refusal::Write { path: answer.clone(), error })?;
        let mut gate = Command::new(program);
        gate.arg("gate").arg(out).args(["--format", "json"]).args(self.gate);
        gate.stdout(file).stderr(log.handle()?);
        let status = match process::run(&mut gate, Some(self.timeout), self.interrupt) {
            Ok(Ended::Exited(status)) => status,
            Ok(Ended::TimedOut) => return Ok(skip(format!("the gate took longer than {} s", self.timeout.as_secs()))),
            Ok(Ended::Interrupted) => return Err(Stop::Interrupted),
            Err(error) => return Err(Refusal::Request(format!("the gate cannot be started: {error}")).into()),
        };
        let report = fs::read(&answer).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let run = judged(status, report.as_ref());
        let told = run.as_ref().map_or_else(String::clone, |run| {
            format!("{}{}", run.verdict.name(), run.detail.as_deref().map(|why| format!(": {why}")).unwrap_or_default())
        });
        log.line(&format!("run {number}: {told}"))?;
        match run {
            Ok(run) => Ok(run),
            Err(message) if self.skip_malformed => Ok(skip(format!("the bundle is malformed: {message}"))),
            Err(message) => Err(Stop::Malformed(format!(
                "commit {}: its bundle is malformed: {message}; mend the capture command, or skip such commits with \
                 --skip-malformed",
                short(hash)
            ))),
        }
    }

    /// Runs a command of the user in the tree; gives why it did not end well.
    fn shell(
        &self,
        text: &str,
        hash: &str,
        run: Option<(&Path, usize)>,
        log: &mut Log<'_>,
    ) -> Result<Option<String>, Stop> {
        let case = self.case.map(|case| case.display().to_string());
        let out = run.map(|(out, _)| out.display().to_string());
        let names = [("commit", Some(hash)), ("case", case.as_deref()), ("out", out.as_deref())];
        let text = process::filled(text, &names);
        log.line(&format!("$ {text}"))?;
        let mut command = process::shell(&text);
        git::here(&mut command).current_dir(self.tree.git().dir()).stdout(log.handle()?).stderr(log.handle()?);
        for (name, value) in names {
            let name = format!("ASSAY_{}", name.to_uppercase());
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some((_, number)) = run {
            command.env("ASSAY_RUN", number.to_string());
        }
        let why = match process::run(&mut command, Some(self.timeout), self.interrupt) {
            Ok(Ended::Exited(status)) if status.success() => return Ok(None),
            Ok(Ended::Exited(status)) => process::words(status),
            Ok(Ended::TimedOut) => format!("took longer than {} s", self.timeout.as_secs()),
            Ok(Ended::Interrupted) => return Err(Stop::Interrupted),
            Err(error) => return Err(Refusal::Request(format!("the shell cannot be started: {error}")).into()),
        };
        log.line(&why)?;
        Ok(Some(why))
    }
}

/// What the gate's exit code and report say; the message of a malformed bundle.
fn judged(status: ExitStatus, report: Option<&GateReport>) -> Result<Run, String> {
    let of = |verdict| {
        let cases = report.map_or(&[][..], |report| &report.cases);
        cases.iter().find(|case: &&CaseReport| case.verdict == verdict)
    };
    match status.code() {
        Some(0) => Ok(Run { verdict: Mark::Good, detail: None, first_divergence: None, cause: None }),
        Some(1) => {
            let case = of(Verdict::Fail);
            Ok(Run {
                verdict: Mark::Bad,
                detail: case.and_then(summary::headline),
                first_divergence: case.and_then(|case| case.first_divergence.clone()),
                cause: case.and_then(|case| case.cause.clone()),
            })
        }
        Some(2) => {
            let message = report.and_then(|report| report.message.clone());
            Err(message.unwrap_or_else(|| "the gate refused it; the log says why".to_owned()))
        }
        Some(125) => {
            let why = of(Verdict::Unjudged).and_then(summary::headline);
            Ok(skip(why.unwrap_or_else(|| "the gate could not judge it".to_owned())))
        }
        _ => Ok(skip(format!("the gate {}", process::words(status)))),
    }
}

fn skip(why: String) -> Run {
    Run { verdict: Mark::Skip, detail: Some(why), first_divergence: None, cause: None }
}

/// An empty directory, whatever was there.
fn empty(folder: &Path) -> Result<(), Refusal> {
    let removed = match folder.symlink_metadata() {
        Ok(found) if found.is_dir() => fs::remove_dir_all(folder),
        Ok(_) => fs::remove_file(folder),
        Err(_) => Ok(()),
    };
    let made = removed.and_then(|()| fs::create_dir(folder));
    made.map_err(|error| Refusal::Write { path: folder.to_path_buf(), error })
}

/// A commit's log: what ran, and what it said.
struct Log<'a> {
    path: &'a Path,
    file: File,
}

impl<'a> Log<'a> {
    fn create(path: &'a Path) -> Result<Self, Refusal> {
        let failed = |error| Refusal::Write { path: path.to_path_buf(), error };
        // An earlier search's log of the commit is replaced; several processes then append to it.
        File::create(path).map_err(failed)?;
        let file = OpenOptions::new().append(true).open(path).map_err(failed)?;
        Ok(Self { path, file })
    }

    fn failed(&self, error: std::io::Error) -> Refusal {
        Refusal::Write { path: self.path.to_path_buf(), error }
    }

    fn line(&mut self, text: &str) -> Result<(), Refusal> {
        writeln!(self.file, "assay: {text}").map_err(|error| self.failed(error))
    }

    fn handle(&self) -> Result<File, Refusal> {
        self.file.try_clone().map_err(|error| self.failed(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn the_gates_ends_are_told_apart() {
        use std::os::unix::process::ExitStatusExt as _;
        let exited = |code: i32| ExitStatus::from_raw(code << 8);
        let mark = |status| judged(status, None).map(|run| run.verdict);
        assert_eq!(mark(exited(0)), Ok(Mark::Good));
        assert_eq!(mark(exited(1)), Ok(Mark::Bad));
        assert_eq!(mark(exited(125)), Ok(Mark::Skip));
        assert_eq!(mark(exited(101)), Ok(Mark::Skip));
        assert_eq!(mark(ExitStatus::from_raw(9)), Ok(Mark::Skip));
        let refused = GateReport::refused("captures.safetensors: truncated");
        assert_eq!(judged(exited(2), Some(&refused)).unwrap_err(), "captures.safetensors: truncated");
    }
}
