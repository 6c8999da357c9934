//! One bundle and how to look at it, for the searches that take one.

use std::path::PathBuf;
use std::time::Instant;

use cases::{InputStore, Inputs, PolicyRequest};
use clap::Args;
use device::Bundle;
use goldens::report::CaseReport;
use goldens::{Job, judge};

use crate::commands::gate::{only, probability, tensor};
use crate::commands::show::Format;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report;

/// A bundle to search.
#[derive(Args)]
pub struct Request {
    /// The bundle: its directory or its case file
    #[arg(value_name = "BUNDLE")]
    bundle: PathBuf,
    /// Rounding rules the device is held to: auto, production, rne, or a YAML file {site: rule};
    /// default: what the case says, else auto
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// Look at these captured tensors only, hide the others (`out`: search from the output alone)
    #[arg(long, value_name = "TENSOR,...", value_delimiter = ',', value_parser = tensor)]
    tensors: Option<Vec<String>>,
    /// Probability that right kernels fail all the same
    #[arg(long, value_name = "P", default_value_t = goldens::FALSE_ALARM, value_parser = probability)]
    false_alarm: f64,
    /// Format on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    pub format: Format,
}

impl Request {
    /// The gate's report on the bundle, with a search for its cause if asked for.
    ///
    /// # Errors
    /// The first thing about the request or the bundle that is wrong; token runs, which have other searches.
    pub fn judge(&self, explain: bool) -> Result<CaseReport, Refusal> {
        let started = Instant::now();
        let policy = self.policy.as_deref().map(PolicyRequest::from_flag).transpose()?;
        let only = self.tensors.as_deref().map(only).transpose()?;
        let bundle = Bundle::open(&self.bundle)?;
        if bundle.case.batch().is_none() {
            return Err(Refusal::Request(format!(
                "{}: is a token run, not a decode layer; `assay gate` names the first step of it that is wrong",
                self.bundle.display()
            )));
        }
        let bar = Bar::new(1);
        let inputs = Inputs::generate(&bundle.case, &InputStore::new())?;
        let policy = policy.as_ref().unwrap_or(&bundle.case.policy);
        let job =
            Job { only: only.as_ref(), false_alarm: self.false_alarm, explain, ..Job::new(&bundle, &inputs, policy) };
        let refused = |error| Refusal::Judge { case: bundle.case.path.clone(), error: Box::new(error) };
        let mut report = judge(&job, &bar).map_err(refused)?;
        report.path = report::text::place(&bundle.case.path);
        report.seconds = started.elapsed().as_secs_f64();
        if let (PolicyRequest::Custom(_), Some(file)) = (policy, &self.policy) {
            report.policy.asked.clone_from(file);
        }
        Ok(report)
    }
}
