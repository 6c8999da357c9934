//! Report formats. Each is a view of [`goldens::report::GateReport`] and none of them judges.

pub mod bench;
pub mod bisect;
pub mod commits;
pub mod diff;
pub mod doctor;
pub mod github;
pub mod html;
pub mod human;
pub mod json;
pub mod junit;
pub mod layers;
pub mod power;
pub mod summary;
pub mod text;
pub mod tokens;

#[cfg(test)]
mod tests;
