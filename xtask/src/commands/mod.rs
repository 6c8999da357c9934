//! The commands, one module each.

pub mod bench;
pub mod case;
pub mod doctor;
pub mod gate;
mod generate;
pub mod model;
mod prompts;
mod show;
pub mod tokens;
