//! Products and sums, in levels: plain loops, which are the specification, and faster ones for each instruction
//! set, which give the same bits ([`level`]).
//!
//! The order of every FP32 sum is part of the reference's contract and never depends on a register
//! width or on a thread count: work is split over output columns, never over a sum.

#[cfg(target_arch = "x86_64")]
mod aligned;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod level;
pub mod matmul;
#[cfg(target_arch = "aarch64")]
mod neon;
mod ordered;
#[cfg(target_arch = "x86_64")]
mod packed;
mod plain;
#[cfg(target_arch = "x86_64")]
mod source;
pub mod sum;
#[cfg(test)]
mod tests;
mod upcoming;
#[cfg(target_arch = "x86_64")]
mod vbmi;

pub use level::{Block, Kernels, LevelError, Weighted, choose, kernels, levels};
pub use matmul::{distinct_rows, exact_bf16_product, matmul_bf16, matmul_down, matmul_i8, matmul_i8_into};
pub use plain::Plain;
pub use sum::SumOrder;
pub use upcoming::Upcoming;
