//! `assay bisect stage`: where in a layer drift is made.

use clap::Args;
use goldens::bisect::stages;
use goldens::report::Verdict;

use super::bundle::Request;
use crate::commands::show::{Format, json};
use crate::exit_codes::Code;
use crate::refusal::Refusal;
use crate::{output, report};

/// The request.
#[derive(Args)]
pub struct Stage {
    #[command(flatten)]
    request: Request,
}

impl Stage {
    /// Searches and reports. 0: it could answer, a right device included; 125: there was nothing to judge.
    ///
    /// # Errors
    /// As [`Request::judge`].
    pub fn run(&self) -> Result<Code, Refusal> {
        let case = self.request.judge(false)?;
        let found = stages(&case);
        match self.request.format {
            Format::Json => json(&found)?,
            Format::Human => output::stdout(&report::bisect::stage(&found, &case))?,
        }
        Ok(if case.verdict == Verdict::Unjudged { Code::Unjudged } else { Code::Pass })
    }
}
