//! The commands, one module each.

pub mod bench;
pub mod bisect;
pub mod case;
pub mod diff;
pub mod doctor;
pub mod export;
pub mod gate;
mod generate;
mod golden;
pub mod import;
pub mod inspect;
pub mod model;
pub mod power;
mod prompts;
pub mod report;
pub mod show;
mod source;
pub mod tokens;
