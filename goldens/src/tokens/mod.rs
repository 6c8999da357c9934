//! Token sequences: goldens made from the reference, and verdicts on what a device generated (`docs/tokens.md`).
//!
//! A [`Golden`] holds, for every step, the largest logits and how far the permitted freedoms move the gaps between
//! them. So a device's token is the reference's, one that a right device may choose as well, or wrong; no tolerance is
//! tuned. This module reads and writes goldens, keeps pending ones beside accepted ones, and judges.

mod dump;
mod golden;
pub mod spread;
mod yaml;

pub use dump::{Dump, DumpError, DumpFault, STEP_SECONDS};
pub use golden::{Accepted, Candidate, Choice, FORMAT, Golden, Kind, Limits, Model, Row, Step, Stop};
pub use yaml::GoldenError;
