//! `assay bisect`: where drift was made, since when, and why.

mod bundle;
mod cause;
mod commit;
mod layer;
mod stage;

use clap::Subcommand;

use crate::exit_codes::Code;
use crate::refusal::Refusal;

/// What to search.
#[derive(Subcommand)]
pub enum Command {
    /// The first stage, row, head, page and element of a bundle at which drift is made
    Stage(Box<stage::Stage>),
    /// The deviation from the contract that gives what the device gave
    Cause(Box<cause::Cause>),
    /// Find the first layer and step of a token run at which drift is made
    Layer(Box<layer::Layer>),
    /// Find the commit of a kernel's repository that broke it
    Commit(Box<commit::Commit>),
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request, or with a file that it names.
    pub fn run(&self) -> Result<Code, Refusal> {
        match self {
            Self::Stage(stage) => stage.run(),
            Self::Cause(cause) => cause.run(),
            Self::Layer(layer) => layer.run(),
            Self::Commit(commit) => commit.run(),
        }
    }
}
