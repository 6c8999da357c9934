//! `assay bisect`: where did it go wrong.

pub mod layer;

use clap::Subcommand;

use crate::exit_codes::Code;
use crate::refusal::Refusal;

/// What to search.
#[derive(Subcommand)]
pub enum Command {
    /// Find the first layer and step of a token run at which drift is made
    Layer(Box<layer::Layer>),
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request.
    pub fn run(&self) -> Result<Code, Refusal> {
        match self {
            Self::Layer(layer) => layer.run(),
        }
    }
}
