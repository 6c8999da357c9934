//! Whole BF16 tensors compared bit by bit, at the speed at which memory is read.

use half::bf16;
use half::slice::HalfFloatSliceExt as _;
use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;

/// Elements that one task compares; fixed, so that work does not depend on the thread count.
const CHUNK: usize = 1 << 18;
/// Elements that are looked at once for being all the same, and again, out of the nearest cache, where they are not.
/// A count of them fits 16 bits.
const BLOCK: usize = 1 << 12;
/// Magnitude bits of infinity: every larger one is NaN.
const INFINITY: u16 = 0x7F80;

/// How two BF16 tensors differ. NaN equals NaN, whatever its bits; +0 and -0 differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bf16Comparison {
    /// Elements that differ.
    pub differing: u64,
    /// Index of the first of them.
    pub first: Option<usize>,
    /// Largest distance of two elements that are numbers, in BF16 steps: one between neighbours, none between -0 and +0.
    pub steps: u16,
    /// Differing elements of which one is NaN. They have no distance.
    pub one_nan: u64,
}

impl Bf16Comparison {
    /// What two parts say together, `later` beginning at element `at`.
    fn with(self, later: Self, at: usize) -> Self {
        Self {
            differing: self.differing + later.differing,
            first: self.first.or(later.first.map(|first| at + first)),
            steps: self.steps.max(later.steps),
            one_nan: self.one_nan + later.one_nan,
        }
    }
}

/// Compares two BF16 tensors of one shape, on all threads. Elements that one of them lacks differ and have no distance.
#[must_use]
pub fn compare_bf16(device: &[bf16], reference: &[bf16]) -> Bf16Comparison {
    let length = device.len().min(reference.len());
    let pairs = device[..length].par_chunks(CHUNK).zip(reference[..length].par_chunks(CHUNK));
    let chunks: Vec<Bf16Comparison> = pairs.map(|(device, reference)| chunk(device, reference)).collect();
    let both = chunks
        .into_iter()
        .enumerate()
        .fold(Bf16Comparison::default(), |all, (index, chunk)| all.with(chunk, index * CHUNK));
    let missing = device.len().max(reference.len()) - length;
    let first = (missing > 0).then_some(0);
    both.with(Bf16Comparison { differing: missing as u64, first, ..Bf16Comparison::default() }, length)
}

/// One task's part.
fn chunk(device: &[bf16], reference: &[bf16]) -> Bf16Comparison {
    let (device, reference) = (device.reinterpret_cast(), reference.reinterpret_cast());
    let arch = Arch::new();
    let mut all = Bf16Comparison::default();
    for (index, (device, reference)) in device.chunks(BLOCK).zip(reference.chunks(BLOCK)).enumerate() {
        if device == reference {
            continue;
        }
        let (differing, one_nan, steps) = arch.dispatch(Block { device, reference });
        let differs = |(a, b): (&u16, &u16)| a != b && !(is_nan(*a) && is_nan(*b));
        let first = (all.first.is_none() && differing > 0).then(|| device.iter().zip(reference).position(differs));
        let block = Bf16Comparison {
            differing: u64::from(differing),
            first: first.flatten(),
            steps,
            one_nan: u64::from(one_nan),
        };
        all = all.with(block, index * BLOCK);
    }
    all
}

#[inline(always)]
fn is_nan(bits: u16) -> bool {
    bits & 0x7FFF > INFINITY
}

/// A number's place on the line of all BF16 numbers, both zeros at one place.
#[inline(always)]
fn place(bits: u16) -> i16 {
    let magnitude = (bits & 0x7FFF) as i16;
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}

/// The loop over one block. It is its own type so that it is compiled once for each level of the CPU.
struct Block<'a> {
    device: &'a [u16],
    reference: &'a [u16],
}

impl NullaryFnOnce for Block<'_> {
    /// Elements that differ, those of them of which one is NaN, and the largest distance.
    type Output = (u16, u16, u16);

    #[inline(always)]
    fn call(self) -> Self::Output {
        let (mut differing, mut one_nan, mut steps) = (0u16, 0u16, 0u16);
        for (&a, &b) in self.device.iter().zip(self.reference) {
            let (nan_a, nan_b) = (is_nan(a), is_nan(b));
            let (place_a, place_b) = (place(a), place(b));
            let distance = (place_a.max(place_b) as u16).wrapping_sub(place_a.min(place_b) as u16);
            differing += u16::from((a != b) & !(nan_a & nan_b));
            one_nan += u16::from(nan_a != nan_b);
            steps = steps.max(if nan_a | nan_b { 0 } else { distance });
        }
        (differing, one_nan, steps)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::compare::same_bf16;

    /// The definition, element by element.
    fn naive(device: &[bf16], reference: &[bf16]) -> Bf16Comparison {
        let mut all = Bf16Comparison::default();
        for (index, (&a, &b)) in device.iter().zip(reference).enumerate() {
            if same_bf16(a, b) {
                continue;
            }
            all.differing += 1;
            all.first = all.first.or(Some(index));
            if a.is_nan() || b.is_nan() {
                all.one_nan += 1;
            } else {
                let steps = crate::tally::ulps(reference::DType::Bf16, a.to_bits().into(), b.to_bits().into());
                all.steps = all.steps.max(u16::try_from(steps).unwrap());
            }
        }
        all
    }

    /// Bits among which those at the edges are frequent.
    fn bits() -> impl Strategy<Value = u16> {
        let edges = vec![0, 0x8000, 1, 0x8001, 0x3F80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0xFFC0, 0x7FFF, 0xFFFF];
        prop_oneof![any::<u16>(), prop::sample::select(edges)]
    }

    proptest! {
        #[test]
        fn every_count_is_the_naive_one(
            base in prop::collection::vec(bits(), 1..300),
            changes in prop::collection::vec((any::<prop::sample::Index>(), bits()), 0..40),
            length in 0usize..3 * BLOCK,
        ) {
            let device: Vec<bf16> = (0..length).map(|i| bf16::from_bits(base[i % base.len()])).collect();
            let mut reference = device.clone();
            for (index, bits) in changes.into_iter().filter(|_| length > 0) {
                reference[index.index(length)] = bf16::from_bits(bits);
            }
            prop_assert_eq!(compare_bf16(&device, &reference), naive(&device, &reference));
        }
    }

    #[test]
    fn the_first_difference_is_found_behind_chunks_and_a_missing_tail_differs() {
        let device = vec![bf16::ONE; 2 * CHUNK + 9];
        let mut reference = device.clone();
        assert_eq!(compare_bf16(&device, &reference), Bf16Comparison::default());
        for (index, value) in [(CHUNK + BLOCK + 5, -bf16::ONE), (2 * CHUNK + 8, bf16::NAN)] {
            reference[index] = value;
        }
        let found = compare_bf16(&device, &reference);
        assert_eq!(found, Bf16Comparison { differing: 2, first: Some(CHUNK + BLOCK + 5), steps: 0x7F00, one_nan: 1 });
        let cut = compare_bf16(&device, &device[..CHUNK - 1]);
        assert_eq!((cut.differing, cut.first, cut.steps), (CHUNK as u64 + 10, Some(CHUNK - 1), 0));
    }

    #[test]
    fn every_element_of_a_block_may_differ() {
        let found = compare_bf16(&[bf16::MAX; BLOCK], &[bf16::MIN; BLOCK]);
        assert_eq!((found.differing, found.steps), (BLOCK as u64, 2 * 0x7F7F));
    }
}
