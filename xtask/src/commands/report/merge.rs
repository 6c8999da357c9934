//! `assay report merge`: the reports of shards joined to that of the whole run. Whether they belong together is decided
//! in `goldens::merge`; this reads the files and shows what came back.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::Args;
use goldens::merge::{JsonPart, Kind, TokensPart, join, join_power, join_tokens};
use goldens::power::faults;
use reference::Deviation;

use super::junit;
use crate::commands::gate::{Format, check_place, step_summary};
use crate::exit_codes::{Code, ending, ending_of};
use crate::refusal::Refusal;
use crate::report::text::place;
use crate::{output, report};

/// Longest report that is read, in bytes.
const LONGEST: u64 = 1 << 30;

/// The request.
#[derive(Args)]
pub struct Merge {
    /// JSON reports of `assay gate`, `assay power` or `assay tokens check --all`, or JUnit reports: of each shard one
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Write the joined JSON report to this file
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write a joined JUnit report to this file
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Format of the joined report on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
    /// Show every tensor, element and remark, of passing cases too
    #[arg(long, short)]
    verbose: bool,
}

/// The text of a report.
struct Text {
    file: String,
    text: String,
}

impl Text {
    /// Whether it is XML: JSON begins otherwise.
    fn is_xml(&self) -> bool {
        self.text.trim_start_matches('\u{feff}').trim_start().starts_with('<')
    }
}

impl Merge {
    /// Joins and reports.
    ///
    /// # Errors
    /// A file that is no report, reports that do not belong together, or one that cannot be written.
    pub fn run(&self) -> Result<Code, Refusal> {
        for (flag, path) in [("--output", &self.output), ("--junit", &self.junit)] {
            if let Some(path) = path {
                check_place(flag, path)?;
                self.check_is_no_input(flag, path)?;
            }
        }
        if self.output.is_some() && self.output == self.junit {
            return Err(Refusal::Request("--output and --junit name one file; name two".into()));
        }
        let texts = self.files.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
        let xml = texts.iter().filter(|text| text.is_xml()).count();
        if xml == texts.len() {
            return self.join_junit(&texts);
        }
        if let Some(one) = texts.iter().find(|text| text.is_xml()) {
            return Err(Refusal::Request(format!(
                "{}: is a JUnit report, and others are JSON; join reports of one kind",
                one.file
            )));
        }
        let texts: Vec<(&str, &str)> = texts.iter().map(|text| (text.file.as_str(), text.text.as_str())).collect();
        match Kind::of_all(&texts)? {
            Kind::Gate => self.join_json(&texts),
            Kind::Power => self.join_power(&texts),
            Kind::Tokens => self.join_tokens(&texts),
        }
    }

    fn join_tokens(&self, texts: &[(&str, &str)]) -> Result<Code, Refusal> {
        if self.format == Format::Github {
            let only = "use --junit FILE, --output FILE, or --format json or human";
            return Err(Refusal::Request(format!(
                "from reports of `assay tokens check` no summary can be made; {only}"
            )));
        }
        let parts = texts.iter().map(|(file, text)| TokensPart::parse(file, text)).collect::<Result<Vec<_>, _>>()?;
        let (report, whole) = join_tokens(parts)?;
        let json = || report::json::text(&whole);
        if let Some(path) = &self.output {
            write(path, &json())?;
        }
        if let Some(path) = &self.junit {
            let text =
                report::junit::of_tokens(&report).map_err(|error| Refusal::Write { path: path.clone(), error })?;
            write(path, &text)?;
        }
        output::stdout(&match self.format {
            Format::Json => json(),
            _ => report::tokens::run(&report, self.verbose),
        })?;
        Ok(ending_of(None, report.verdict, report.goldens.is_empty(), Kind::Tokens.entry()).0)
    }

    fn join_power(&self, texts: &[(&str, &str)]) -> Result<Code, Refusal> {
        if self.junit.is_some() || self.format == Format::Github {
            let only = "--output FILE.md for the page, --output FILE.json or --format json for the trials";
            return Err(Refusal::Request(format!(
                "from reports of `assay power` no such report can be made; use {only}"
            )));
        }
        let (merged, cases) = join_power(texts)?;
        let tried = |fault: &Deviation| cases.iter().any(|case| case.trials.iter().any(|trial| trial.id == fault.id));
        let faults: Vec<Deviation> = faults().into_iter().filter(tried).collect();
        let missing = !merged.missing.is_empty();
        let found = report::power::Found::new(&cases, &faults).of_merged(merged);
        let json = || serde_json::to_string_pretty(&found).map(|text| text + "\n").unwrap_or_default();
        if let Some(path) = &self.output {
            let page = path.extension().is_some_and(|extension| extension == "md");
            write(path, &if page { report::power::markdown(&found) } else { json() })?;
        }
        output::stdout(&if self.format == Format::Json { json() } else { report::power::human(&found) })?;
        Ok(match (found.holds(), missing) {
            (false, _) => Code::Failure,
            (true, true) => Code::Unjudged,
            (true, false) => Code::Pass,
        })
    }

    fn join_json(&self, texts: &[(&str, &str)]) -> Result<Code, Refusal> {
        let parts = texts.iter().map(|(file, text)| JsonPart::parse(file, text)).collect::<Result<Vec<_>, _>>()?;
        let (report, whole) = join(parts)?;
        let json = || report::json::text(&whole);
        if let Some(path) = &self.output {
            write(path, &json())?;
        }
        if let Some(path) = &self.junit {
            let text = report::junit::render(&report).map_err(|error| Refusal::Write { path: path.clone(), error })?;
            write(path, &text)?;
        }
        step_summary(self.format, &report)?;
        output::stdout(&match self.format {
            Format::Human => report::human::render(&report, self.verbose),
            Format::Json => json(),
            Format::Github => report::github::render(&report),
        })?;
        Ok(ending(&report).0)
    }

    fn join_junit(&self, texts: &[Text]) -> Result<Code, Refusal> {
        let Some(path) = &self.junit else {
            return Err(Refusal::Request("JUnit reports are joined to one: say where to with --junit FILE".into()));
        };
        if self.output.is_some() || self.format != Format::Human {
            let only = "they say too little for another report: join the JSON reports for --output and --format";
            return Err(Refusal::Request(format!("from JUnit reports only --junit can be made; {only}")));
        }
        let parts = texts.iter().map(|text| junit::read(&text.file, &text.text)).collect::<Result<Vec<_>, _>>()?;
        let joined = junit::join(parts)?;
        write(path, &joined.text)?;
        output::stdout(&joined.said)?;
        Ok(joined.verdict.into())
    }

    /// A report must not replace one that it is made of.
    fn check_is_no_input(&self, flag: &str, path: &Path) -> Result<(), Refusal> {
        let Ok(target) = path.canonicalize() else { return Ok(()) };
        match self.files.iter().find(|file| file.canonicalize().is_ok_and(|file| file == target)) {
            Some(file) => Err(Refusal::Request(format!("{flag}: {} is an input of this run", place(file)))),
            None => Ok(()),
        }
    }
}

fn read(path: &Path) -> Result<Text, Refusal> {
    let file = place(path);
    let wrong = |what: String| Refusal::Request(format!("{file}: {what}"));
    // Asked before opening: opening a pipe waits for its writer.
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(wrong("is not a regular file".into()));
    }
    let mut bytes = Vec::new();
    let opened = File::open(path).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    opened.take(LONGEST + 1).read_to_end(&mut bytes).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    if bytes.len() as u64 > LONGEST {
        return Err(wrong("is longer than a report can be (1 GiB)".into()));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        wrong(format!("is no text: byte {} is no UTF-8; name a JSON or JUnit report", error.utf8_error().valid_up_to()))
    })?;
    Ok(Text { file, text })
}

fn write(path: &Path, text: &str) -> Result<(), Refusal> {
    device::write_atomically(path, text.as_bytes()).map_err(|error| Refusal::Write { path: path.to_path_buf(), error })
}
