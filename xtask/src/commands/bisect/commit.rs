//! `assay bisect commit`: find the commit of a kernel's repository that broke it. `git bisect` chooses the commits, in
//! a work tree of its own; what runs of a commit say together is in `goldens::commits`.

mod check;
mod git;
mod worktree;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use cases::Case;
use clap::{Args, Parser as _};
use goldens::commits::{self, BisectReport, Mark, Outcome, Tried};

use self::check::{Checker, Stop};
use self::git::Git;
use self::worktree::Worktree;
use crate::commands::gate;
use crate::commands::show::{Format, json};
use crate::exit_codes::Code;
use crate::output;
use crate::process::Interrupt;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::{place, plain, short};

/// The request.
#[derive(Args)]
#[command(
    after_help = "Both commands run in the checked out commit, with {out} and ASSAY_OUT, {case} and ASSAY_CASE, \
    {commit} and ASSAY_COMMIT for what they name. A build that fails, a capture that fails and a bundle that cannot be \
    judged skip the commit. Exit codes: 0 the first bad commit was found; 1 the good end fails or the bad end passes; \
    2 the request or a bundle is wrong; 125 it could not be told"
)]
pub struct Commit {
    /// The kernel's repository; its work tree is not touched
    #[arg(long, value_name = "DIR", default_value = ".")]
    repo: PathBuf,
    /// A commit that passes
    #[arg(long, value_name = "REV")]
    good: String,
    /// A later commit that fails
    #[arg(long, value_name = "REV", default_value = "HEAD")]
    bad: String,
    /// Shell command that builds the kernel; where it fails, the commit is skipped
    #[arg(long, value_name = "COMMAND")]
    build: Option<String>,
    /// Shell command that runs the kernel and leaves a bundle, or captures.safetensors for --case, in {out}
    #[arg(long, value_name = "COMMAND")]
    capture: String,
    /// The case that is run at every commit; without it the capture command leaves a case.yaml too
    #[arg(long, value_name = "FILE")]
    case: Option<PathBuf>,
    /// Time limit of each command; what takes longer is ended, and the commit skipped
    #[arg(long, value_name = "SECONDS", default_value_t = 3600,
          value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    timeout: u64,
    /// Runs of each commit that have to agree; where they do not, as many again are made, and a flaky commit is skipped
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeat: u16,
    /// Skip a commit whose bundle is malformed instead of ending the search
    #[arg(long)]
    skip_malformed: bool,
    /// Follow the first parent of merges only: find the merge that brought the fault
    #[arg(long)]
    first_parent: bool,
    /// Remove untracked and ignored files before each commit: build from scratch
    #[arg(long)]
    clean: bool,
    /// Directory for a log of each commit; default: assay-bisect in the repository's git directory
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
    /// Format on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
    /// Options of `assay gate`, behind `--`: -- --policy rne --tensors out
    #[arg(last = true, value_name = "GATE-OPTION")]
    gate: Vec<OsString>,
}

/// Options of the gate by themselves.
#[derive(clap::Parser)]
#[command(no_binary_name = true)]
struct GateOptions {
    #[command(flatten)]
    gate: gate::Gate,
}

/// The two ends of a search.
struct Ends {
    good: commits::Commit,
    bad: commits::Commit,
}

/// How a search came out: the outcome in a word and a sentence, and the commits it is about.
struct Answer {
    outcome: Outcome,
    message: String,
    first_bad: Option<commits::Commit>,
    suspects: Vec<commits::Commit>,
    /// The oldest commit known to be bad.
    bad: Option<String>,
}

impl Answer {
    fn of(outcome: Outcome, message: String) -> Self {
        Self { outcome, message, first_bad: None, suspects: Vec::new(), bad: None }
    }
}

impl Commit {
    /// Searches and reports. The repository is as it was when this returns.
    ///
    /// # Errors
    /// What is wrong with the request, or what git refuses; no report has been printed then.
    pub fn run(&self) -> Result<Code, Refusal> {
        self.check_gate_options()?;
        let repository = Git::new(&self.repo);
        let top = self.check_repository(&repository)?;
        let ends = self.ends(&repository)?;
        let case =
            self.case.as_deref().map(Case::load).transpose()?.map(|case| case.path.canonicalize().unwrap_or(case.path));
        let logs = self.logs(&repository)?;
        let (answer, tried) = {
            let interrupt = Interrupt::catch()?;
            let tree = Worktree::add(&repository, &ends.good.hash)?;
            let steps = self.first_list(&repository, &ends)?.ilog2() as usize + 3;
            let bar = Bar::new(steps);
            let mut checker = Checker {
                build: self.build.as_deref(),
                capture: &self.capture,
                case: case.as_deref(),
                gate: &self.gate,
                timeout: Duration::from_secs(self.timeout),
                repeat: usize::from(self.repeat),
                skip_malformed: self.skip_malformed,
                clean: self.clean,
                logs: &logs,
                tree: &tree,
                interrupt: &interrupt,
                bar: &bar,
                tried: Vec::new(),
            };
            let answer = match self.search(&mut checker, &ends) {
                Ok(answer) => answer,
                Err(Stop::Refused(refusal)) => return Err(refusal),
                Err(Stop::Malformed(message)) => Answer::of(Outcome::Malformed, message),
                Err(Stop::Interrupted) => {
                    Answer::of(Outcome::Interrupted, "ended before there was an answer".to_owned())
                }
            };
            (answer, checker.tried)
        };
        let failure =
            tried.iter().find(|tried| Some(&tried.commit.hash) == answer.bad.as_ref()).and_then(Tried::failure);
        let report = BisectReport {
            verdict: answer.outcome.verdict(),
            outcome: answer.outcome,
            message: answer.message,
            repository: top,
            good: ends.good,
            bad: ends.bad,
            first_bad: answer.first_bad,
            suspects: answer.suspects,
            first_divergence: failure.and_then(|run| run.first_divergence.clone()),
            detail: failure.and_then(|run| run.detail.clone()),
            cause: failure.and_then(|run| run.cause.clone()),
            tried,
        };
        match self.format {
            Format::Json => json(&report)?,
            Format::Human => output::stdout(&crate::report::commits::render(&report))?,
        }
        Ok(report.verdict.into())
    }

    /// Options that the search gives itself, and those that the gate does not know, are refused before anything runs.
    fn check_gate_options(&self) -> Result<(), Refusal> {
        let own = ["--format", "--junit", "--html", "--shard", "--suite", "--run"];
        for option in self.gate.iter().filter_map(|option| option.to_str()) {
            if let Some(own) = own.iter().find(|own| option.split('=').next() == Some(**own)) {
                return Err(Refusal::Request(format!(
                    "{own} behind `--`: the search says itself what the gate judges and how"
                )));
            }
        }
        match GateOptions::try_parse_from(&self.gate) {
            Ok(options) if options.gate.names_paths() => Err(Refusal::Request(
                "behind `--` stand options of the gate; what it judges is what --capture leaves".into(),
            )),
            Ok(_) => Ok(()),
            Err(error) => {
                let told = error.to_string();
                let told = told.trim_start_matches("error: ").lines().next().unwrap_or_default().to_owned();
                Err(Refusal::Request(format!("behind `--`, which is for options of the gate: {told}")))
            }
        }
    }

    /// The repository's top directory.
    fn check_repository(&self, repository: &Git) -> Result<String, Refusal> {
        let top = repository.text(&["rev-parse", "--show-toplevel"])?;
        let place = || plain(&top).into_owned();
        for state in ["BISECT_START", "BISECT_LOG"] {
            let file = repository.text(&["rev-parse", "--git-path", state])?;
            if self.repo.join(file).exists() {
                let place = place();
                return Err(Refusal::Request(format!(
                    "{place}: a bisection is under way there; end it: git bisect reset"
                )));
            }
        }
        // What is not tracked is in no commit, and no commit that is tried has it.
        let changes =
            repository.text(&["status", "--porcelain", "--untracked-files=no", "--ignore-submodules=untracked"])?;
        if let Some(first) = changes.lines().next() {
            let (place, file) = (place(), plain(first.get(3..).unwrap_or(first)).into_owned());
            return Err(Refusal::Request(format!(
                "{place}: has changes that are in no commit ({file}), and only commits are tried; commit or stash them"
            )));
        }
        Ok(top)
    }

    fn ends(&self, repository: &Git) -> Result<Ends, Refusal> {
        let (good, bad) = (repository.commit("--good", &self.good)?, repository.commit("--bad", &self.bad)?);
        if good == bad {
            return Err(Refusal::Request(format!("--good and --bad are the same commit, {}", short(&good))));
        }
        if !repository.holds(&["merge-base", "--is-ancestor", &good, &bad])? {
            let base = repository.text(&["merge-base", &good, &bad]).ok();
            let hint = base.map(|base| format!("; their common ancestor is {}", short(&base))).unwrap_or_default();
            return Err(Refusal::Request(format!(
                "--good {}: is no ancestor of --bad {}, so that no commit between them need have broken anything; name \
                 a good commit that the bad one descends from{hint}",
                self.good, self.bad
            )));
        }
        Ok(Ends { good: repository.describe(&good)?, bad: repository.describe(&bad)? })
    }

    /// Where the logs go.
    fn logs(&self, repository: &Git) -> Result<PathBuf, Refusal> {
        let folder = match &self.logs {
            Some(folder) => folder.clone(),
            None => self.repo.join(repository.text(&["rev-parse", "--git-common-dir"])?).join("assay-bisect"),
        };
        let made = std::fs::create_dir_all(&folder).and_then(|()| folder.canonicalize());
        made.map_err(|error| Refusal::Write { path: folder, error })
    }

    /// How many commits there are to choose from, at least one.
    fn first_list(&self, repository: &Git, ends: &Ends) -> Result<usize, Refusal> {
        let left = self.left(repository, &ends.bad.hash, std::slice::from_ref(&ends.good.hash))?;
        Ok(left.len().max(1))
    }

    /// The commits that may be the first bad one, newest first: `bad`, and what it has that no good one has.
    fn left(&self, git: &Git, bad: &str, good: &[String]) -> Result<Vec<String>, Refusal> {
        let mut args = vec!["rev-list", "--topo-order"];
        args.extend(self.first_parent.then_some("--first-parent"));
        args.extend([bad, "--not"]);
        args.extend(good.iter().map(String::as_str));
        args.push("--");
        Ok(git.text(&args)?.lines().map(str::to_owned).collect())
    }

    fn search(&self, checker: &mut Checker<'_>, ends: &Ends) -> Result<Answer, Stop> {
        if let Some(wrong) = wrong_end(checker, ends)? {
            return Ok(wrong);
        }
        let git = checker.tree.git().clone();
        let (mut good, mut bad) = (vec![ends.good.hash.clone()], ends.bad.hash.clone());
        let mut skipped = BTreeSet::new();
        // Without a checkout of its own: a file that a build left would stop it.
        let mut start = vec!["bisect", "start", "--no-checkout"];
        start.extend(self.first_parent.then_some("--first-parent"));
        start.extend([ends.bad.hash.as_str(), ends.good.hash.as_str(), "--"]);
        let mut told = git.output(&start)?;
        loop {
            let left = self.left(&git, &bad, &good)?;
            if left.iter().all(|hash| *hash == bad || skipped.contains(hash)) {
                let all = left.iter().map(|hash| git.describe(hash)).collect::<Result<Vec<_>, _>>()?;
                return Ok(answer(all, bad));
            }
            let next = git.text(&["rev-parse", "--verify", "--quiet", "BISECT_HEAD"]).ok();
            let next = next.filter(|next| !checker.tried.iter().any(|tried| tried.commit.hash == *next));
            let Some(next) = next.filter(|_| told.status.success()) else {
                let why = git::said(&told);
                return Err(Refusal::Request(format!("git bisect names no commit to try next: {why}")).into());
            };
            let mark = checker.check(&next)?;
            match mark {
                Mark::Good => good.push(next.clone()),
                Mark::Bad => bad.clone_from(&next),
                Mark::Skip => {
                    skipped.insert(next.clone());
                }
            }
            told = git.output(&["bisect", mark.name(), &next])?;
        }
    }
}

/// Tries the two ends: a check that fails where it should pass, or passes where it should fail, finds no commit.
fn wrong_end(checker: &mut Checker<'_>, ends: &Ends) -> Result<Option<Answer>, Stop> {
    for (commit, name, expected) in [(&ends.good, "good", Mark::Good), (&ends.bad, "bad", Mark::Bad)] {
        let mark = checker.check(&commit.hash)?;
        if mark == expected {
            continue;
        }
        let end = format!("the {name} end {}", short(&commit.hash));
        let (outcome, message) = match mark {
            Mark::Bad => (Outcome::GoodEndFails, format!("{end} fails: name an older commit that passes")),
            Mark::Good => (
                Outcome::BadEndPasses,
                format!("{end} passes: name a commit that fails, or more runs (--repeat) if it fails now and then"),
            ),
            Mark::Skip => {
                let reason = checker.tried.last().and_then(|tried| tried.reason.clone()).unwrap_or_default();
                (Outcome::EndNotJudged, format!("{end} could not be judged: {reason}"))
            }
        };
        let bad = (mark == Mark::Bad).then(|| commit.hash.clone());
        return Ok(Some(Answer { bad, ..Answer::of(outcome, message) }));
    }
    Ok(None)
}

/// The answer when these are all that may be the first bad commit.
fn answer(mut left: Vec<commits::Commit>, bad: String) -> Answer {
    let bad = Some(bad);
    match left.len() {
        1 => {
            let first = left.remove(0);
            let message = format!("the first bad commit is {} {}", short(&first.hash), first.subject);
            Answer { first_bad: Some(first), bad, ..Answer::of(Outcome::FirstBad, message) }
        }
        count => {
            let message =
                format!("the first bad commit is one of {count}, because {} of them could not be judged", count - 1);
            Answer { suspects: left, bad, ..Answer::of(Outcome::Suspects, message) }
        }
    }
}

/// Where a path is, for a sentence.
fn at(path: &std::path::Path) -> String {
    plain(&place(path)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_skips_hide_is_a_list_and_no_answer() {
        let commit = |hash: &str| commits::Commit {
            hash: hash.into(),
            subject: "s".into(),
            author: "a".into(),
            date: "d".into(),
        };
        let one = answer(vec![commit("b")], "b".into());
        assert_eq!((one.outcome, one.first_bad.unwrap().hash.as_str()), (Outcome::FirstBad, "b"));
        let several = answer(vec![commit("b"), commit("x"), commit("y")], "b".into());
        assert_eq!((several.outcome, several.suspects.len(), several.first_bad), (Outcome::Suspects, 3, None));
        assert!(several.message.contains("one of 3") && several.message.contains("2 of them"), "{}", several.message);
    }
}
