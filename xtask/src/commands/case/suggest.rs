//! `assay case suggest`: which case would show a fault.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use cases::{Case, Suite};
use clap::Args;
use goldens::power::{Shown, faults};
use goldens::suggest::{Suggestion, suggest};
use reference::Deviation;

use crate::commands::show::{Format, json, table};
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::{place, plain, plural};
use crate::{output, suites};

/// The request.
#[derive(Args)]
pub struct Suggest {
    /// A decode-layer case or bundle: only faults that its data cannot show are listed
    #[arg(value_name = "BUNDLE-OR-CASE", required_unless_present = "fault")]
    path: Option<PathBuf>,
    /// These faults only, by name or by the beginning of their names
    #[arg(long, value_name = "FAULT,...", value_delimiter = ',')]
    fault: Vec<String>,
    /// Look among the cases of a suite: a name or a suite file; may be repeated
    #[arg(long, value_name = "NAME", default_values_t = ["sensitive".to_owned(), "default".to_owned()])]
    suite: Vec<String>,
    /// Copy the cases that were found into this directory
    #[arg(long, value_name = "DIR")]
    write: Option<PathBuf>,
    /// Format on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
}

impl Suggest {
    /// Tries the faults and says which cases show them.
    ///
    /// # Errors
    /// What is wrong with the request or a case.
    pub fn run(&self) -> Result<(), Refusal> {
        let faults = named(&self.fault)?;
        let here = self.path.as_deref().map(Case::load).transpose()?;
        let cases = self.cases()?;
        let bar = Bar::new(cases.len() + usize::from(here.is_some()));
        let found = suggest(here.as_ref(), &cases, &faults, &bar).map_err(|error| {
            let case = self.path.clone().unwrap_or_default();
            Refusal::Judge { case, error: Box::new(error) }
        })?;
        drop(bar);
        if let Some(dir) = &self.write {
            write(dir, &found, &cases)?;
        }
        match self.format {
            Format::Json => json(&found),
            Format::Human => output::stdout(&human(here.as_ref(), &found)),
        }
    }

    /// The decode layers of the suites, each once.
    fn cases(&self) -> Result<Vec<Case>, Refusal> {
        let mut files = Vec::new();
        for name in &self.suite {
            files.extend(Suite::load(&suites::find(name)?)?.bundles);
        }
        let mut seen = BTreeSet::new();
        files.retain(|file| seen.insert(file.canonicalize().unwrap_or_else(|_| file.clone())));
        let cases = files.iter().map(|file| Case::load(file)).collect::<Result<Vec<_>, _>>()?;
        Ok(cases.into_iter().filter(|case| case.batch().is_some()).collect())
    }
}

/// The faults of the catalogue with these names or beginnings of names; without any, all.
///
/// # Errors
/// A name that no fault has.
pub fn named(names: &[String]) -> Result<Vec<Deviation>, Refusal> {
    let all = faults();
    if let Some(unknown) = names.iter().find(|name| !all.iter().any(|fault| fault.id.starts_with(*name))) {
        return Err(Refusal::Request(format!(
            "--fault: no fault is called `{unknown}`; `assay power --format json` lists them"
        )));
    }
    let asked = |fault: &Deviation| names.is_empty() || names.iter().any(|name| fault.id.starts_with(name));
    Ok(all.into_iter().filter(asked).collect())
}

fn write(dir: &Path, found: &[Suggestion], cases: &[Case]) -> Result<(), Refusal> {
    std::fs::create_dir_all(dir).map_err(|error| failed(dir, error))?;
    let shown: BTreeSet<usize> = found.iter().filter_map(|s| s.shown_by.as_ref()).map(|by| by.index).collect();
    for case in shown.into_iter().filter_map(|index| cases.get(index)) {
        // A name such as mini/active2 is no file's.
        let path = dir.join(format!("{}.yaml", case.name.replace(['/', '\\'], "-")));
        let bytes = std::fs::read(&case.path).map_err(|error| failed(&case.path, error))?;
        device::create_atomically(&path, &bytes).map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

fn failed(path: &Path, error: io::Error) -> Refusal {
    Refusal::Write { path: path.to_owned(), error }
}

fn human(here: Option<&Case>, found: &[Suggestion]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    match here {
        Some(case) if found.is_empty() => {
            let _ = writeln!(out, "{} shows each of these faults", plain(&case.name));
            return out;
        }
        Some(case) => {
            let _ = writeln!(out, "{} does not show {} of these faults:", plain(&case.name), found.len());
        }
        None => {}
    }
    let rows = found.iter().map(|suggestion| {
        let here = match &suggestion.here {
            Some(Shown::Permitted) => "within permitted freedom",
            Some(_) => "no bit differs",
            None => "",
        };
        let by = suggestion.shown_by.as_ref();
        [
            suggestion.fault.clone(),
            here.to_owned(),
            by.map_or_else(|| "no case of these suites".to_owned(), |by| by.name.clone()),
            by.map_or_else(String::new, |by| by.at.clone()),
        ]
    });
    table(&mut out, ["fault", "here", "shown by", "at"], rows);
    let mut files: BTreeMap<&str, usize> = BTreeMap::new();
    for by in found.iter().filter_map(|suggestion| suggestion.shown_by.as_ref()) {
        *files.entry(&by.path).or_default() += 1;
    }
    for (path, count) in files {
        let _ = writeln!(out, "{}: {}", plain(&place(Path::new(path))), plural(count as u64, "fault"));
    }
    out
}
