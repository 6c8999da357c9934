//! Helpers of the integration tests: what a test needs to put a device, right or faulty, before the gate.
//!
//! A [`Bench`] is one case with its inputs and a device's outputs: a recorded bundle of the repository, or a
//! small case that the reference itself runs as the device. A [`Device`] is what such a device computed,
//! step by step; a test changes steps of it, lets what follows from the change follow, and hands the
//! outputs to [`Bench::judge`]. [`written`] edits sparse cache rows, [`said`] reads a report. [`targets`] are the readers of
//! hostile bytes.

// This crate is test code from end to end: a helper that cannot go on ends the test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bench;
mod device;
mod files;
mod machine;
mod mutate;
pub mod program;
mod run;
pub mod said;
pub mod targets;
pub mod written;

pub use bench::{Bench, Visible, small, with_recipe};
pub use device::{Device, Token, borrowed};
pub use machine::{Kernel, Machine};
pub use mutate::Mutations;
pub use program::{assay, mock_ascendcl};
pub use run::{Habits, TokenRun, deep_run, small_run, values, values_mut};
