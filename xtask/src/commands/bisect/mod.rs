//! `assay bisect`: where did it go wrong.

pub mod commit;

use clap::Subcommand;

use crate::exit_codes::Code;
use crate::refusal::Refusal;

/// What to search.
#[derive(Subcommand)]
pub enum Command {
    /// Find the commit of a kernel's repository that broke it
    Commit(Box<commit::Commit>),
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request.
    pub fn run(&self) -> Result<Code, Refusal> {
        match self {
            Self::Commit(commit) => commit.run(),
        }
    }
}
