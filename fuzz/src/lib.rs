//! The readers that are fuzzed: the same functions that the tests run on what was found.

#[path = "../../tests/src/targets.rs"]
pub mod targets;
