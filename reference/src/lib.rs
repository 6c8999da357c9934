//! The pure-CPU reference of the Qwen3 A8W8 kernels.
//!
//! A decode layer is a [stage table](stages) in the order of `docs/numerics.md`. Running all stages
//! is a layer; running one stage on a device's own tensors is teacher forcing; running all with one
//! entry of the [`Policy`] changed is a counterfactual; what passes between them is a [`Trace`].
//! A whole [model] is its layers in sequence between embedding and [LM head](head); [prefill] takes prompts through it and
//! [generate] goes on token by token.
//! This crate reads no file, prints nothing and knows neither cases nor devices.

pub mod bounds;
pub mod deviations;
pub mod elementary;
pub mod generate;
pub mod geometry;
pub mod head;
pub mod inputs;
pub mod kernels;
pub mod model;
pub mod policy;
pub mod prefill;
pub mod products;
pub mod rounding;
#[cfg(test)]
mod small;
mod softmax;
pub mod stages;
pub mod tensor;

pub use deviations::Deviation;
pub use geometry::{BATCH, Geometry, PAGE, TILE};
pub use inputs::{Batch, Cache, DownWeight, LayerInputs, LayerWeights};
pub use policy::{Freedom, Policy, Site};
pub use products::Products;
pub use rounding::Rounding;
pub use stages::{Stage, Trace};
pub use tensor::{DType, Tensor, TensorId};
