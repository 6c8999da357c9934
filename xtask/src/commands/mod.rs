//! The commands, one module each.

pub mod bench;
pub mod case;
pub mod doctor;
pub mod gate;
pub mod model;
mod show;
