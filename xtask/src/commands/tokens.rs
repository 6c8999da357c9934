//! `assay tokens`: token sequences, generated and golden.

use clap::Subcommand;

use super::generate::Generate;
use super::golden;
use crate::exit_codes::Code;
use crate::refusal::Refusal;

/// What to do with token sequences.
#[derive(Subcommand)]
pub enum Command {
    /// Generate tokens greedily from prompts, as the contract computes them, with the margin of every choice
    Generate(Box<Generate>),
    #[command(flatten)]
    Golden(golden::Command),
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request.
    pub fn run(&self) -> Result<Code, Refusal> {
        match self {
            Self::Generate(generate) => generate.run(),
            Self::Golden(golden) => golden.run(),
        }
    }
}
