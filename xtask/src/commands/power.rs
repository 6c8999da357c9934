//! `assay power`: mutation testing of the gate itself.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use cases::{Case, InputStore, Inputs, Shard};
use clap::Args;
use goldens::power::{Bed, CasePower, faults};
use goldens::report::ShardReport;
use goldens::{JudgeError, merge};
use rayon::prelude::*;
use reference::{Deviation, Freedom};

use super::gate::check_place;
use super::show::{Format, json};
use crate::exit_codes::Code;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::{output, report, suites};

/// The request.
#[derive(Args)]
pub struct Power {
    /// Decode-layer cases to try the faults in: case files, bundles, or directories searched for them; none: those of
    /// the default suite. Their captures are not looked at
    #[arg(value_name = "CASE-OR-DIRECTORY")]
    paths: Vec<PathBuf>,
    /// Try the cases of a suite: a name or a suite file; may be repeated
    #[arg(long, value_name = "NAME")]
    suite: Vec<String>,
    /// Seeds for each case: the case's own, and those that follow it
    #[arg(long, value_name = "N", default_value = "3")]
    seeds: NonZeroUsize,
    /// Right devices judged in all, with sampled noise, by everything and by `out` alone
    #[arg(long, value_name = "N", default_value_t = 200)]
    clean: u32,
    /// Try these faults only, by name or by the beginning of their names
    #[arg(long, value_name = "FAULT,...", value_delimiter = ',')]
    faults: Vec<String>,
    /// Try the I-th of N parts of the cases only; every case goes by its place in the sorted list of names, modulo N
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    /// Also write the table as Markdown to this file (`docs/power.md` of the repository)
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Format on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
}

/// Keeps the cases of one shard. Trials go by a case's name, and so does the number of cases.
fn take(shard: Shard, cases: &mut Vec<Case>) -> ShardReport {
    let cases_total = cases.iter().map(|case| &case.name).collect::<BTreeSet<_>>().len();
    ShardReport { cases_total, ..merge::take(shard, cases, |case| &case.name) }
}

impl Power {
    /// Tries the faults and reports. 0: every fault that can be told from permitted freedom was caught and located, and
    /// no right device failed; 1 otherwise.
    ///
    /// # Errors
    /// What is wrong with the request or a case.
    pub fn run(&self) -> Result<Code, Refusal> {
        let faults = self.faults()?;
        let mut cases = self.cases()?;
        let shard = self.shard.map(|shard| take(shard, &mut cases));
        let beds = cases.len() * self.seeds.get();
        if let Some(path) = &self.write {
            check_place("--write", path)?;
        }
        let bar = Bar::new(beds * (faults.len() + 1));
        let mut results = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            for seed in 0..self.seeds.get() {
                // The right devices are dealt out over the beds, so that their number is what was asked for.
                let at = index * self.seeds.get() + seed;
                let clean = (self.clean as usize * (at + 1) / beds - self.clean as usize * at / beds) as u32;
                results.push(self.try_one(case, seed as u64, clean, &faults, &bar)?);
            }
        }
        drop(bar);
        let found = report::power::Found::new(&results, &faults).of_shard(shard);
        if let Some(path) = &self.write {
            device::write_atomically(path, report::power::markdown(&found).as_bytes())
                .map_err(|error| Refusal::Write { path: path.clone(), error })?;
        }
        match self.format {
            Format::Json => json(&found)?,
            Format::Human => output::stdout(&report::power::human(&found))?,
        }
        Ok(if found.holds() { Code::Pass } else { Code::Failure })
    }

    fn try_one(
        &self,
        case: &Case,
        seed: u64,
        clean: u32,
        faults: &[Deviation],
        bar: &Bar,
    ) -> Result<CasePower, Refusal> {
        let mut case = case.clone();
        case.seed = case.seed.wrapping_add(seed);
        if seed > 0 {
            // The stated inputs are those of the case's own seed.
            case.inputs_sha256.clear();
        }
        let judged = |error: JudgeError| Refusal::Judge { case: case.path.clone(), error: Box::new(error) };
        let inputs = Inputs::generate(&case, &InputStore::new())?;
        goldens::Progress::begin(bar, &format!("{} seed {}", case.name, case.seed));
        let bed = Bed::new(&case, &inputs, Freedom::Sampled { seed: case.seed }).map_err(judged)?;
        let trials = faults
            .par_iter()
            .map(|fault| {
                let trial = bed.trial(fault);
                bar.done();
                trial
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(judged)?;
        let right = (0..clean)
            .into_par_iter()
            .map(|n| bed.false_alarms(Freedom::Sampled { seed: case.seed ^ ((u64::from(n) + 1) << 32) }))
            .collect::<Result<Vec<_>, _>>()
            .map_err(judged)?;
        let (mut false_alarms, mut others_false_alarms) = (0, [0; 4]);
        for (failed, others) in right {
            false_alarms += failed;
            others.add_to(&mut others_false_alarms);
        }
        bar.done();
        Ok(CasePower { name: case.name.clone(), seed: case.seed, clean, false_alarms, others_false_alarms, trials })
    }

    /// The faults that the request names.
    fn faults(&self) -> Result<Vec<Deviation>, Refusal> {
        let all = faults();
        if let Some(unknown) = self.faults.iter().find(|name| !all.iter().any(|fault| fault.id.starts_with(*name))) {
            return Err(Refusal::Request(format!(
                "--faults: no fault is called `{unknown}`; docs/power.md lists them, or `assay power --format json`"
            )));
        }
        let asked = |fault: &Deviation| self.faults.is_empty() || self.faults.iter().any(|n| fault.id.starts_with(n));
        Ok(all.into_iter().filter(asked).collect())
    }

    /// The decode-layer cases that the request names, in the order named, each once.
    fn cases(&self) -> Result<Vec<Case>, Refusal> {
        let default = (self.paths.is_empty() && self.suite.is_empty()).then_some("default");
        let files = suites::files(self.suite.iter().map(String::as_str).chain(default), &self.paths)?;
        let cases = files.iter().map(|file| Case::load(file)).collect::<Result<Vec<_>, _>>()?;
        let cases: Vec<Case> = cases.into_iter().filter(|case| case.batch().is_some()).collect();
        if cases.is_empty() {
            return Err(Refusal::Request("none of the cases is a decode layer, in which faults can be tried".into()));
        }
        Ok(cases)
    }
}
