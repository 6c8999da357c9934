//! Verdicts from first principles on captured kernel outputs.
//!
//! [`judge`] walks the reference's stage table beside a bundle's captures. A stage whose inputs the
//! device gave is recomputed from them (`forced`), and each element of what it wrote is exact, an
//! explained rounding flip, an explained tie, or drift; what lies behind a gap is judged against a
//! sampled distribution. `docs/verdicts.md` derives every rule. This crate prints nothing.

mod attention;
pub mod bisect;
mod bits;
mod cause;
mod checks;
pub mod commits;
mod compare;
mod coverage;
pub mod diff;
mod elements;
mod evidence;
pub mod exchange;
mod judge;
pub mod launched;
pub mod maps;
pub mod merge;
pub mod mutant;
mod notes;
mod only;
mod place;
pub mod power;
mod repeat;
pub mod report;
mod rules;
pub mod run_state;
mod runs;
pub mod shrink;
mod spread;
mod statistics;
pub mod suggest;
mod tally;
pub mod tokens;
mod unforced;

pub use bits::{Bf16Comparison, compare_bf16};
pub use cause::Memo;
pub use elements::Scalar;
pub use judge::{FALSE_ALARM, Job, JudgeError, Progress, judge};
pub use only::{Only, TokenTensor};
pub use repeat::{Repeats, repeatability};
pub use runs::layerwise;
pub use statistics::{Statistics, statistics};

/// How one element compares with the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// The value the contract gives, bit for bit.
    Exact,
    /// Within the derived bound of a rounding boundary, or of the exact FP32 value.
    Flip,
    /// An exact tie that went by another rule than the one asked for.
    Tie,
    /// Nothing permitted explains it.
    Drift,
    /// Not compared: another row's write is what this place holds.
    Skipped,
}
