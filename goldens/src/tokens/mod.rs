//! Token sequences: goldens made from the reference, and verdicts on what a device generated (`docs/tokens.md`).
//!
//! A [`Golden`] holds, for every step, the largest logits and how far the permitted freedoms move the gaps between
//! them. So a device's token is the reference's, one that a right device may choose as well, or wrong; no tolerance is
//! tuned. A [`Store`] keeps pending goldens beside accepted ones, a [`Reference`] makes them and follows a device's own
//! tokens, and [`check`] judges.

pub mod diff;
mod dump;
mod dumps;
mod golden;
mod judge;
pub mod report;
mod review;
mod run;
pub mod spread;
mod store;
#[cfg(test)]
mod testing;
mod yaml;

pub use dump::{Dump, DumpError, DumpFault, STEP_SECONDS};
pub use dumps::{Dumps, DumpsError, without_dump};
pub use golden::{Accepted, Candidate, Choice, FORMAT, Golden, Kind, Model, Row, Step, Stop};
pub use judge::{Check, Decode, Follow, Forced, check, check_again, without_tokens};
pub use review::{Review, RowReview, review, review_standing};
pub use run::Reference;
pub use store::{Entry, Recorded, Standing, State, Store, StoreError, date};
pub use yaml::GoldenError;
