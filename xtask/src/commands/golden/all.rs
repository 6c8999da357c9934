//! `assay tokens check --all`: every accepted golden, or one shard of them, against the dump of its name, or run again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cases::Tokenizer;
use goldens::merge::take;
use goldens::report::GateReport;
use goldens::tokens::report::{StepVerdict, TokensReport, TokensRun};
use goldens::tokens::{self, Dump, Dumps, Golden, without_dump};

use super::check::{Check, Follower, again, judge, same};
use crate::commands::gate::check_place;
use crate::commands::show::{Format, json};
use crate::commands::source::Source;
use crate::exit_codes::{Code, ending_of};
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::place;
use crate::{output, report};

/// The model of a request.
struct Model {
    source: Source,
    fingerprint: String,
}

impl Model {
    fn made(&self, golden: &Golden) -> bool {
        golden.model.fingerprint == self.fingerprint
    }
}

/// What is judged of a golden.
enum Job {
    /// Its dump.
    Dump(Dump),
    /// Nothing, because there is nothing to judge.
    Said(TokensReport),
    /// The reference, a second time.
    Again,
}

/// Judges and reports.
///
/// # Errors
/// The first thing about the request or an input that is wrong; nothing was judged then.
pub fn run(check: &Check) -> Result<Code, Refusal> {
    if let Some(path) = &check.junit {
        check_place("--junit", path)?;
        check_apart(check, path)?;
    }
    let outcome = judge_all(check);
    let written = check.junit.as_ref().map_or(Ok(()), |path| {
        let text = match &outcome {
            Ok(report) => report::junit::of_tokens(report),
            Err(refusal) => report::junit::render(&GateReport::refused(&refusal.to_string())),
        };
        text.and_then(|text| device::write_atomically(path, text.as_bytes()))
            .map_err(|error| Refusal::Write { path: path.clone(), error })
    });
    // A refused request has a more useful story to tell than its report file.
    let report = outcome?;
    // Standard output holds a report or the reason why there is none, for programs one of the two.
    match check.format {
        Format::Json => {
            written?;
            json(&report)?;
        }
        Format::Human => {
            output::stdout(&report::tokens::run(&report, check.verbose))?;
            written?;
        }
    }
    Ok(ending_of(report.shard, report.verdict, report.goldens.is_empty(), "golden").0)
}

fn judge_all(check: &Check) -> Result<TokensRun, Refusal> {
    let store = check.folder.store()?;
    let mut goldens = store.standards()?;
    let dumps = check.dumps.as_deref().map(|dir| Dumps::list(dir, goldens.iter().map(|golden| golden.name.as_str())));
    let dumps = dumps.transpose()?;
    let mut remarks: Vec<String> = dumps.as_ref().and_then(Dumps::remark).into_iter().collect();
    let tokenizer = check.tokenizer()?;
    let model = open(check)?;
    // Every machine sees the whole list, and refuses or splits it alike.
    match &model {
        Some(model) => remarks.extend(keep_or_refuse(model, &mut goldens, dumps.is_some(), store.dir())?),
        None if dumps.is_none() => {
            return Err(Refusal::Request(
                "--all: name the directory of dumps with --dumps, or the model with --model or --case to run its \
                 goldens again"
                    .into(),
            ));
        }
        None => {}
    }
    let shard = check.shard.map(|shard| take(shard, &mut goldens, |golden| &golden.name));
    // Reading is cheap and judging is not: whatever is malformed is refused before anything runs.
    let jobs = goldens.into_iter().map(|golden| Ok((job(&golden, dumps.as_ref())?, golden)));
    let jobs = jobs.collect::<Result<Vec<_>, Refusal>>()?;
    let reports = judge_jobs(&jobs, model.as_ref(), tokenizer.as_ref())?;
    Ok(TokensRun { shard, remarks, ..TokensRun::new(reports) })
}

fn open(check: &Check) -> Result<Option<Model>, Refusal> {
    let Some(source) = check.place.open()? else { return Ok(None) };
    Ok(Some(Model { fingerprint: source.fingerprint()?, source }))
}

/// Sees that the model is that of a golden at least. Without dumps only its own goldens are kept, which can be run; a
/// remark names the others.
fn keep_or_refuse(
    model: &Model,
    goldens: &mut Vec<Golden>,
    dumps: bool,
    dir: &Path,
) -> Result<Option<String>, Refusal> {
    let name = model.source.name();
    for golden in goldens.iter().filter(|golden| model.made(golden)) {
        same(&model.source, &model.fingerprint, golden)?;
    }
    let others = goldens.iter().filter(|golden| !model.made(golden));
    let others: Vec<String> = others.map(|golden| format!("{} (of {})", golden.name, golden.model.name)).collect();
    if others.len() == goldens.len() {
        return Err(Refusal::Request(format!(
            "{name}: is the model of no golden in {}, by its fingerprint {}; there are: {}",
            dir.display(),
            model.fingerprint,
            others.join(", "),
        )));
    }
    if dumps || others.is_empty() {
        return Ok(None);
    }
    goldens.retain(|golden| model.made(golden));
    Ok(Some(format!("goldens of other models than {name} were not run: {}", others.join(", "))))
}

fn job(golden: &Golden, dumps: Option<&Dumps>) -> Result<Job, Refusal> {
    let Some(dumps) = dumps else { return Ok(Job::Again) };
    let Some(path) = dumps.of(&golden.name) else { return Ok(Job::Said(without_dump(golden, dumps))) };
    match Dump::read(path) {
        Ok(dump) => {
            dump.check_prompts(golden, None)?;
            Ok(Job::Dump(dump))
        }
        Err(error) => match tokens::without_tokens(golden, &error) {
            Some(report) => Ok(Job::Said(report)),
            None => Err(error.into()),
        },
    }
}

fn judge_jobs(
    jobs: &[(Job, Golden)],
    model: Option<&Model>,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<TokensReport>, Refusal> {
    let own = |golden: &Golden| model.is_some_and(|model| model.made(golden));
    let weights = model.map(|model| model.source.weights()).transpose()?;
    let longest = jobs.iter().filter(|(_, golden)| own(golden)).map(|(_, golden)| golden.limits.max_seq_len).max();
    let bar = Bar::new(jobs.len());
    let follower = match (model, &weights, longest) {
        (Some(model), Some(weights), Some(longest)) => {
            Some(Follower { weights: &**weights, rope: model.source.rope(longest)?, bar: &bar })
        }
        _ => None,
    };
    let mut reports = Vec::new();
    for (job, golden) in jobs {
        goldens::Progress::begin(&bar, &golden.name);
        let follower = follower.as_ref().filter(|_| own(golden));
        // The ids of another model are other words.
        let tokenizer = tokenizer.filter(|_| model.is_none() || own(golden));
        let mut report = match (job, follower) {
            (Job::Said(report), _) => report.clone(),
            (Job::Dump(dump), _) => {
                let job = tokens::Check { golden, dump, row: None, before: None, decode: None };
                judge(job, follower, tokenizer)?
            }
            (Job::Again, Some(follower)) => again(golden, follower)?,
            // Only goldens of the model are run again.
            (Job::Again, None) => continue,
        };
        let open = report.steps.iter().any(|step| step.verdict == StepVerdict::Unjudged);
        if let (Some(model), true, false) = (model, open, own(golden)) {
            let (named, of) = (model.source.name(), &golden.model.name);
            report.remarks.push(format!("judged by the golden alone: it is of the model {of}, and {named} is another"));
        }
        reports.push(report);
        bar.done();
    }
    Ok(reports)
}

/// A report must not replace what it reports on. It is kept out of all directories that the run reads: there it might
/// be taken for one of their files the next time.
fn check_apart(check: &Check, junit: &Path) -> Result<(), Refusal> {
    let folder = junit.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Some(output) = folder.canonicalize().ok().zip(junit.file_name()).map(|(folder, name)| folder.join(name)) else {
        return Ok(());
    };
    // An existing file may be a link to another place.
    let outputs = [output.canonicalize().ok(), Some(output)];
    let store = check.folder.store()?.dir().to_owned();
    let named = [&check.dumps, &check.place.model, &check.place.case, &check.tokenizer];
    let mut inputs: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
    for input in named.into_iter().flatten().chain([&store]) {
        inputs.extend(input.canonicalize().ok().map(|target| (target, input.clone())));
    }
    let linked = check.dumps.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    let linked = linked.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink())).map(|entry| entry.path());
    inputs.extend(linked.filter_map(|input| Some((input.canonicalize().ok()?, input))));
    let within = |(target, _): &(&PathBuf, &PathBuf)| outputs.iter().flatten().any(|output| output.starts_with(target));
    match inputs.iter().find(within) {
        Some((_, input)) => Err(Refusal::Request(format!(
            "--junit: {} lies in {}, which this run reads; name a file elsewhere",
            place(junit),
            place(input)
        ))),
        None => Ok(()),
    }
}
