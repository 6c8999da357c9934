//! Tensors that come from and go to other tools: what the reference gives for a case as a golden for them, and which
//! of the contract's tensors the entries of a foreign dump are. An entry that its content does not tell apart from
//! another is never guessed at.

mod content;
mod distance;
mod error;
mod identify;
mod map;
mod outputs;
mod targets;

pub use distance::Distance;
pub use error::ExchangeError;
pub use identify::{Candidate, Found, Identified, IdentifiedEntry, Taken, identify};
pub use map::read_map;
pub use outputs::{Outputs, device_outputs, reference_outputs};
pub use targets::{IGNORE, Kind, Target, targets};
