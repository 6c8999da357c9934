//! Cases: what was run.
//!
//! A [`Case`] is a checked `case.yaml`: geometry, seed, recipes, batch metadata and where the outputs come
//! from. [`Inputs`] are its tensors, drawn by the [seeded generator](seeded) and checked against their
//! hashes. A [`checkpoint`] holds the weights of a whole model, and is made of BF16 weights by a rule. [`Suite`]s list
//! bundles. This crate computes no step of the contract and judges nothing.

#[cfg(target_endian = "big")]
compile_error!("hashes and captures are over little-endian bytes, which tensors are taken to have in memory");

mod atomic;
mod case;
mod check;
pub mod checkpoint;
mod error;
pub mod header;
mod input;
mod inputs;
mod launch;
mod mapped;
mod model;
mod new;
mod policy;
mod recipe;
mod schema;
pub mod seeded;
mod shard;
mod suite;
#[cfg(feature = "tokenizer")]
mod tokenizer;
mod warnings;
mod yaml;

pub use atomic::{create_atomically, create_atomically_with, write_atomically};
pub use case::{CASE_FILE, Case, DecodeCase, DeviceInfo, DeviceKind, Kernel, KernelKind, Padding, Poison, TokensCase};
pub use checkpoint::{Checkpoint, CheckpointError};
pub use error::CaseError;
pub use input::{Extent, Input};
pub use inputs::{InputError, InputStore, Inputs};
pub use launch::{Argument, BatchTensor, Launch, Scalar, ScalarKind, ScalarValue};
pub use mapped::Mapped;
pub use model::GeneratedModel;
pub use new::{NewCase, NewCaseError, new_case, standard_recipes};
pub use policy::PolicyRequest;
pub use recipe::{OutlierColumns, Recipe, RecipeError, RecipeKind};
pub use shard::{MOST_SHARDS, Shard, ShardError};
pub use suite::{DiscoverError, Suite, discover};
#[cfg(feature = "tokenizer")]
pub use tokenizer::{TOKENIZER_FILE, Tokenizer, TokenizerError};
