//! `assay report`: reports that were written before.

mod junit;
pub mod merge;

use clap::Subcommand;

use crate::exit_codes::Code;
use crate::refusal::Refusal;

/// What to do with reports.
#[derive(Subcommand)]
pub enum Command {
    /// Join the reports of a run that was split with --shard, and judge the whole
    Merge(Box<merge::Merge>),
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request or a report.
    pub fn run(&self) -> Result<Code, Refusal> {
        match self {
            Self::Merge(merge) => merge.run(),
        }
    }
}
