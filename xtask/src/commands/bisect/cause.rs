//! `assay bisect cause`: which deviation from the contract gives what the device gave.

use clap::Args;
use goldens::report::{Candidate, CaseReport, Cause as Found, Reproduced, Verdict};
use serde::Serialize;

use super::bundle::Request;
use crate::commands::show::{Format, json};
use crate::exit_codes::Code;
use crate::refusal::Refusal;
use crate::{output, report};

/// The request.
#[derive(Args)]
pub struct Cause {
    #[command(flatten)]
    request: Request,
}

/// The answer in JSON (`docs/bisect.md`, Cause).
#[derive(Serialize)]
struct Answer<'r> {
    name: &'r str,
    path: &'r str,
    verdict: Verdict,
    cause: Option<&'r Found>,
    candidates: &'r [Candidate],
    reproduced: Reproduced,
    first_divergence: Option<&'r str>,
    visible: bool,
    notes: &'r [String],
}

impl<'r> Answer<'r> {
    fn new(case: &'r CaseReport) -> Self {
        let explanation = case.explanation.as_ref();
        Self {
            name: &case.name,
            path: &case.path,
            verdict: case.verdict,
            cause: case.cause.as_ref(),
            candidates: explanation.map_or(&[], |e| &e.candidates),
            reproduced: explanation.map_or_else(Reproduced::default, |e| e.reproduced),
            first_divergence: case.first_divergence.as_deref(),
            visible: explanation.is_some_and(|e| e.visible),
            notes: explanation.map_or(&[], |e| &e.notes),
        }
    }
}

impl Cause {
    /// Searches and reports. 0: it could answer, "none of these" included; 125: there was nothing to judge.
    ///
    /// # Errors
    /// As [`Request::judge`].
    pub fn run(&self) -> Result<Code, Refusal> {
        let case = self.request.judge(true)?;
        match self.request.format {
            Format::Json => json(&Answer::new(&case))?,
            Format::Human => output::stdout(&report::bisect::cause(&case))?,
        }
        Ok(if case.verdict == Verdict::Unjudged { Code::Unjudged } else { Code::Pass })
    }
}
