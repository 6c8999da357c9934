//! The seeded generator, version 1 of `docs/seeded-tensors.md`: every element is a pure function of
//! (seed, tensor name, flat index), so a tensor has the same bits in any language and on any number of
//! threads. Loops are branch-free over fixed blocks, which the compiler turns into vector code: random bits in vectors
//! of 64-bit numbers, then values made of them in vectors of 32-bit ones.

use std::ops::Range;

use half::bf16;
use half::vec::HalfBitsVecExt as _;
use ndarray::{Array2, ShapeError};
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;
use reference::{DType, Tensor};
use thiserror::Error;

use crate::recipe::{OutlierColumns, Recipe, RecipeError, RecipeKind, SIGMA};

/// Elements that one task fills; fixed, so that work does not depend on the thread count.
const CHUNK: usize = 1 << 16;
/// Elements that are drawn before values are made of them: few enough to stay in the nearest cache.
const BLOCK: usize = 64;
/// Increment of the SplitMix64 counter.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// Why a tensor cannot be generated.
#[derive(Clone, Debug, Error)]
pub enum SeededError {
    /// The recipe does not fit.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The element count does not fit the address space.
    #[error("shape {0:?} has more elements than the address space")]
    TooLarge([usize; 2]),
    /// No generator for the element type.
    #[error("no recipe makes {0} tensors")]
    DType(&'static str),
    /// Rows and columns disagree with the element count.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

/// The random integers of one tensor.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    base: u64,
}

impl Stream {
    /// The stream of tensor `name` under `seed`.
    #[must_use]
    pub fn new(seed: u64, name: &str) -> Self {
        Self { base: seed ^ fnv1a(name) }
    }

    /// The same stream counted from element `first` on.
    #[must_use]
    pub fn from(self, first: u64) -> Self {
        Self { base: self.base.wrapping_add(first.wrapping_mul(GOLDEN)) }
    }

    /// The 64 random bits `z` of element `index`.
    #[must_use]
    #[inline(always)]
    pub fn z(self, index: u64) -> u64 {
        mix(self.counter(index))
    }

    /// What `z` is mixed from. It grows by [`GOLDEN`] from element to element.
    #[inline(always)]
    fn counter(self, index: u64) -> u64 {
        self.base.wrapping_add(index.wrapping_add(1).wrapping_mul(GOLDEN))
    }
}

/// FNV-1a, 64 bits, of a tensor name.
#[must_use]
pub fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// SplitMix64's output function.
#[inline(always)]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The nearly normal integer `s` in -131070..=131070 of an element: four uniform 16-bit numbers, centred.
#[must_use]
#[inline(always)]
pub fn centred(z: u64) -> i32 {
    // Two sums at once, each in a half of its own.
    const EVEN: u64 = 0x0000_FFFF_0000_FFFF;
    let pairs = (z & EVEN) + ((z >> 16) & EVEN);
    (pairs as u32 + (pairs >> 32) as u32) as i32 - 131_070
}

/// Generates a tensor of `shape` (`[rows, columns]`, row-major) and type BF16, FP32 or INT8.
///
/// # Errors
/// A recipe that does not fit `dtype`, another `dtype`, a shape beyond the address space.
pub fn tensor(seed: u64, name: &str, dtype: DType, shape: [usize; 2], recipe: &Recipe) -> Result<Tensor, SeededError> {
    rows(seed, name, dtype, 0..shape[0], shape[1], recipe)
}

/// Generates some rows of a tensor that need not fit the memory: the same values that [`tensor`] has there.
///
/// # Errors
/// As [`tensor`].
pub fn rows(
    seed: u64,
    name: &str,
    dtype: DType,
    rows: Range<usize>,
    columns: usize,
    recipe: &Recipe,
) -> Result<Tensor, SeededError> {
    recipe.check(dtype)?;
    let shape = [rows.len(), columns];
    let too_large = || SeededError::TooLarge([rows.end, columns]);
    let count = shape[0].checked_mul(columns).ok_or_else(too_large)?;
    let first = rows.start.checked_mul(columns).ok_or_else(too_large)?;
    let stream = Stream::new(seed, name).from(first as u64);
    match dtype {
        DType::F32 => {
            let values = reals(stream, count, columns, recipe, |value| value);
            Ok(Tensor::F32(Array2::from_shape_vec(shape, values)?))
        }
        DType::Bf16 => {
            let values: Vec<bf16> = reals(stream, count, columns, recipe, bf16_bits).reinterpret_into();
            Ok(Tensor::Bf16(Array2::from_shape_vec(shape, values)?))
        }
        DType::I8 => Ok(Tensor::I8(Array2::from_shape_vec(shape, codes(stream, count, recipe.kind))?)),
        _ => Err(SeededError::DType(dtype.name())),
    }
}

/// Real values under `recipe`, each narrowed by `narrow` once it has its outlier factor.
fn reals<T: Copy + Default + Send + Sync>(
    stream: Stream,
    count: usize,
    columns: usize,
    recipe: &Recipe,
    narrow: impl Fn(f32) -> T + Sync,
) -> Vec<T> {
    let outliers = recipe.outlier_columns;
    match recipe.kind {
        RecipeKind::Normal { mean, std, bf16 } => {
            let (k, mean) = ((std / SIGMA) as f32, mean as f32);
            let value = move |s| s as f32 * k + mean;
            if bf16 {
                fill(stream, count, columns, outliers, centred, value, |wide| {
                    narrow(f32::from_bits(u32::from(bf16_bits(wide)) << 16))
                })
            } else {
                fill(stream, count, columns, outliers, centred, value, narrow)
            }
        }
        RecipeKind::Uniform { lo, hi } => {
            let (low, width) = (lo as f32, (hi - lo) as f32);
            // 24 random bits times 2^-24: exact.
            let value = move |top: i32| low + top as f32 * (1.0 / 16_777_216.0) * width;
            fill(stream, count, columns, outliers, |z| (z >> 40) as i32, value, narrow)
        }
        RecipeKind::Constant { value } => fill(stream, count, columns, outliers, |_| 0, |_| value as f32, narrow),
        RecipeKind::Ones => fill(stream, count, columns, outliers, |_| 0, |_| 1.0, narrow),
        RecipeKind::Zeros | RecipeKind::Int8Normal { .. } => vec![narrow(0.0); count],
    }
}

/// Fills `count` elements in chunks, then draws the outlier columns again with their factor.
fn fill<T: Copy + Default + Send + Sync>(
    stream: Stream,
    count: usize,
    columns: usize,
    outliers: Option<OutlierColumns>,
    draw: impl Fn(u64) -> i32 + Sync,
    value: impl Fn(i32) -> f32 + Sync,
    narrow: impl Fn(f32) -> T + Sync,
) -> Vec<T> {
    let mut values = zeros(count);
    each_chunk(&mut values, stream, &draw, |drawn| narrow(value(drawn)));
    if let Some(OutlierColumns { period, phase, factor }) = outliers
        && columns > 0
    {
        let factor = factor as f32;
        values.par_chunks_mut(columns).enumerate().for_each(|(row, values)| {
            for (column, slot) in values.iter_mut().enumerate().skip(phase).step_by(period) {
                *slot = narrow(value(draw(stream.z((row * columns + column) as u64))) * factor);
            }
        });
    }
    values
}

/// INT8 codes under `kind`.
fn codes(stream: Stream, count: usize, kind: RecipeKind) -> Vec<i8> {
    match kind {
        RecipeKind::Int8Normal { std } => {
            let mut values = zeros(count);
            let twice = 2 * std as i32;
            each_chunk(&mut values, stream, centred, |s| code(s, twice));
            values
        }
        RecipeKind::Constant { value } => vec![value as i8; count],
        RecipeKind::Ones => vec![1; count],
        _ => vec![0; count],
    }
}

/// `floor((s * twice + 37837) / 75674)` clamped to -127..=127. The numerator is clamped instead of the
/// quotient and moved above zero, so that one unsigned division by a constant does it.
#[inline(always)]
fn code(s: i32, twice: i32) -> i8 {
    const UNIT: i32 = 2 * 37_837;
    let numerator = (s * twice + UNIT / 2).clamp(-127 * UNIT, 127 * UNIT);
    (((numerator + 127 * UNIT) as u32 / UNIT as u32) as i32 - 127) as i8
}

/// Memory for `count` elements. Zeros come from the system, so that the pages are first touched by the threads that
/// fill them, and once.
fn zeros<T: Copy + Default>(count: usize) -> Vec<T> {
    vec![T::default(); count]
}

/// Sets every element to `make(draw(z))`, in parallel over fixed chunks, with the widest vectors the CPU has.
fn each_chunk<T: Send>(
    values: &mut [T],
    stream: Stream,
    draw: impl Fn(u64) -> i32 + Sync,
    make: impl Fn(i32) -> T + Sync,
) {
    let arch = Arch::new();
    values.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, values)| {
        let counter = stream.counter((chunk * CHUNK) as u64);
        arch.dispatch(FillChunk { values, counter, draw: &draw, make: &make });
    });
}

/// The loop over one chunk. It is its own type so that it is compiled once for each level of the CPU.
struct FillChunk<'a, T, D, M> {
    values: &'a mut [T],
    /// The first element's.
    counter: u64,
    draw: &'a D,
    make: &'a M,
}

impl<T, D: Fn(u64) -> i32, M: Fn(i32) -> T> NullaryFnOnce for FillChunk<'_, T, D, M> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let steps: [u64; BLOCK] = std::array::from_fn(|offset| (offset as u64).wrapping_mul(GOLDEN));
        let mut drawn = [0i32; BLOCK];
        let mut counter = self.counter;
        for values in self.values.chunks_mut(BLOCK) {
            for (drawn, step) in drawn.iter_mut().zip(&steps) {
                *drawn = (self.draw)(mix(counter.wrapping_add(*step)));
            }
            for (slot, &drawn) in values.iter_mut().zip(&drawn) {
                *slot = (self.make)(drawn);
            }
            counter = counter.wrapping_add((BLOCK as u64).wrapping_mul(GOLDEN));
        }
    }
}

/// BF16 bits of a finite value, nearest with ties to even.
#[inline(always)]
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// One of the two RoPE tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rope {
    /// Cosines.
    Cos,
    /// Sines.
    Sin,
}

/// A RoPE table, FP32 `[max_seq, head_dim]`; both halves of a row hold the same values. Angles and functions
/// are FP64 in pure Rust, so their bits do not depend on the platform.
///
/// # Errors
/// A shape beyond the address space.
pub fn rope(table: Rope, max_seq: usize, head_dim: usize, theta: f64) -> Result<Array2<f32>, SeededError> {
    let shape = [max_seq, head_dim];
    let count = max_seq.checked_mul(head_dim).ok_or(SeededError::TooLarge(shape))?;
    let half = head_dim / 2;
    let function = match table {
        Rope::Cos => libm::cos,
        Rope::Sin => libm::sin,
    };
    let frequencies: Vec<f64> = (0..half).map(|j| libm::pow(theta, -2.0 * j as f64 / head_dim as f64)).collect();
    let mut values = vec![0.0; count];
    if half > 0 {
        values.par_chunks_mut(head_dim).enumerate().for_each(|(position, row)| {
            let (lo, hi) = row.split_at_mut(half);
            for ((lo, hi), frequency) in lo.iter_mut().zip(hi).zip(&frequencies) {
                *lo = function(position as f64 * frequency) as f32;
                *hi = *lo;
            }
        });
    }
    Ok(Array2::from_shape_vec(shape, values)?)
}

/// Pages `0..count` in the pseudo-random order that generated block tables use.
#[must_use]
pub fn page_permutation(seed: u64, count: usize) -> Vec<usize> {
    let stream = Stream::new(seed, "block_table");
    let mut pages: Vec<usize> = (0..count).collect();
    pages.sort_by_key(|&page| (stream.z(page as u64), page));
    pages
}

/// The first `length` token ids of generated prompt `prompt`, each below `vocabulary` (at least 1).
#[must_use]
pub fn prompt(seed: u64, prompt: usize, length: usize, vocabulary: usize) -> Vec<usize> {
    let stream = Stream::new(seed, &format!("prompt_tokens_{prompt}"));
    (0..length).map(|index| (stream.z(index as u64) % vocabulary.max(1) as u64) as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every level that this CPU has.
    fn levels() -> Vec<Arch> {
        #[cfg(target_arch = "x86_64")]
        let vector = [pulp::x86::V3::try_new().map(Arch::V3), pulp::x86::V4::try_new().map(Arch::V4)];
        #[cfg(not(target_arch = "x86_64"))]
        let vector: [Option<Arch>; 0] = [];
        std::iter::once(Arch::Scalar).chain(vector.into_iter().flatten()).collect()
    }

    #[test]
    fn every_level_draws_what_the_definition_says() {
        let stream = Stream::new(3, "wq");
        for (level, length) in levels().into_iter().flat_map(|level| [1, 63, 64, 65, 1000].map(|n| (level, n))) {
            let (start, mut codes, mut reals) = (77u64, vec![0i8; length], vec![0u16; length]);
            let counter = stream.counter(start);
            level.dispatch(FillChunk { values: &mut codes, counter, draw: &centred, make: &|s| code(s, 64) });
            let real = |s: i32| bf16_bits(s as f32 * 0.02);
            level.dispatch(FillChunk { values: &mut reals, counter, draw: &centred, make: &real });
            for (offset, (found_code, found_real)) in codes.into_iter().zip(reals).enumerate() {
                let z = stream.z(start + offset as u64);
                let s = [0, 16, 32, 48].into_iter().map(|part| (z >> part & 0xFFFF) as i32).sum::<i32>() - 131_070;
                let exact = (s * 64 + 37_837).div_euclid(2 * 37_837).clamp(-127, 127);
                assert_eq!(i32::from(found_code), exact, "{level:?} {length} {offset}");
                assert_eq!(found_real, bf16::from_f32(s as f32 * 0.02).to_bits(), "{level:?} {length} {offset}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(30))]
        #[test]
        fn rows_are_those_of_the_whole_tensor(seed: u64, first in 0usize..40, more in 0usize..40, columns in 1usize..90) {
            let normal = RecipeKind::Normal { mean: 1.0, std: 0.1, bf16: false };
            let outliers = OutlierColumns { period: 7, phase: 3, factor: 16.0 };
            let real = Recipe { kind: normal, outlier_columns: Some(outliers) };
            let code = Recipe::new(RecipeKind::Int8Normal { std: 32 });
            for (dtype, recipe) in [(DType::Bf16, &real), (DType::F32, &real), (DType::I8, &code)] {
                let whole = tensor(seed, "w", dtype, [80, columns], recipe).unwrap();
                let part = rows(seed, "w", dtype, first..first + more, columns, recipe).unwrap();
                let range = ndarray::s![first..first + more, ..];
                match (whole, part) {
                    (Tensor::Bf16(whole), Tensor::Bf16(part)) => prop_assert_eq!(whole.slice(range), part),
                    (Tensor::F32(whole), Tensor::F32(part)) => prop_assert_eq!(whole.slice(range), part),
                    (Tensor::I8(whole), Tensor::I8(part)) => prop_assert_eq!(whole.slice(range), part),
                    _ => prop_assert!(false, "another type"),
                }
            }
        }
    }
}
