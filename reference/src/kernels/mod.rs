//! Products and sums: the plain kernels, which are the specification of every faster one.
//!
//! The order of every FP32 sum is part of the reference's contract and never depends on a register
//! width or on a thread count: work is split over output columns, never over a sum.

pub mod matmul;
pub mod sum;

pub use matmul::{distinct_rows, exact_bf16_product, matmul_bf16, matmul_i8};
pub use sum::SumOrder;

/// The vector level that the kernels run on. Results do not depend on it.
#[must_use]
pub fn level_name() -> String {
    let level = format!("{:?}", pulp::Arch::new());
    // The variant's name; what follows lists every instruction set it stands for.
    match level.split(['(', ' ']).next().unwrap_or_default() {
        "V3" => "x86-64-v3 (AVX2, FMA)".to_owned(),
        name => name.to_lowercase(),
    }
}
