//! `assay tokens`: golden token sequences.

use clap::Subcommand;

use super::generate::Generate;
use crate::exit_codes::Code;
use crate::refusal::Refusal;

/// What to do with token sequences.
#[derive(Subcommand)]
pub enum Command {
    /// Generate tokens greedily from prompts, as the contract computes them, with the margin of every choice
    Generate(Box<Generate>),
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request.
    pub fn run(&self) -> Result<Code, Refusal> {
        match self {
            Self::Generate(generate) => generate.run(),
        }
    }
}
