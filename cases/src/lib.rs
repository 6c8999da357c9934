//! Cases: what was run.
//!
//! A [`Case`] is a checked `case.yaml`: geometry, seed, recipes, batch metadata and where the outputs come
//! from. [`Inputs`] are its tensors, drawn by the [seeded generator](seeded) and checked against their
//! hashes. [`Suite`]s list bundles. This crate computes no numerics and judges nothing.

#[cfg(target_endian = "big")]
compile_error!("hashes and captures are over little-endian bytes, which tensors are taken to have in memory");

mod case;
mod check;
mod error;
mod input;
mod inputs;
mod new;
mod policy;
mod recipe;
mod schema;
pub mod seeded;
mod suite;
mod warnings;
mod yaml;

pub use case::{CASE_FILE, Case, DecodeCase, DeviceInfo, DeviceKind, Kernel, KernelKind, Padding, Poison, TokensCase};
pub use error::CaseError;
pub use input::{Extent, Input};
pub use inputs::{InputError, InputStore, Inputs};
pub use new::{NewCase, NewCaseError, new_case, standard_recipes};
pub use policy::PolicyRequest;
pub use recipe::{OutlierColumns, Recipe, RecipeError, RecipeKind};
pub use suite::{DiscoverError, Suite, discover};
