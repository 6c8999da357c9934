//! What a comparison of two dumps says: plain data, for text and JSON alike.

use serde::Serialize;

use super::RANGES;
use crate::elements::Scalar;
use crate::report::Verdict;

/// Two dumps.
#[derive(Clone, Debug, Serialize)]
pub struct DumpDiff {
    /// Pass where all is equal, unjudged where all that could be compared is.
    pub verdict: Verdict,
    /// Where the first one is.
    pub a: String,
    /// Where the second one is.
    pub b: String,
    /// Tensors of both, by name.
    pub tensors: Vec<TensorDiff>,
    /// Tensors of the first one only.
    pub only_a: Vec<String>,
    /// Tensors of the second one only.
    pub only_b: Vec<String>,
    /// Tensors of both that one of the two holds no usable data of, with the reason.
    pub not_compared: Vec<String>,
    /// What else the dumps say of themselves.
    pub remarks: Vec<String>,
}

impl DumpDiff {
    /// Says what comparisons say together; whatever only one of the two has is a difference.
    #[must_use]
    pub fn judged(mut self) -> Self {
        let equal = self.tensors.iter().all(|tensor| tensor.verdict == Verdict::Pass);
        self.verdict = if !equal || !self.only_a.is_empty() || !self.only_b.is_empty() {
            Verdict::Fail
        } else if self.tensors.is_empty() || !self.not_compared.is_empty() {
            Verdict::Unjudged
        } else {
            Verdict::Pass
        };
        self
    }
}

/// Two tensors of one name.
#[derive(Clone, Debug, Serialize)]
pub struct TensorDiff {
    /// Their name.
    pub name: String,
    /// Pass where element types, shapes and all bits are equal.
    pub verdict: Verdict,
    /// Their element types.
    pub dtype: [String; 2],
    /// Their shapes.
    pub shape: [Vec<usize>; 2],
    /// Elements of the first one.
    pub elements: u64,
    /// Elements whose bits differ; none where types or shapes do, so that no element has a counterpart.
    pub differing: Option<u64>,
    /// Elements that are NaN or infinite, of each.
    pub nonfinite: [u64; 2],
    /// Distances of the differing elements.
    pub ulps: Option<Ulps>,
    /// The elements furthest apart, with one NaN first.
    pub worst: Vec<Differing>,
    /// What differing elements have in common.
    pub patterns: Patterns,
    /// What else is to be said, such as another order of memory.
    pub notes: Vec<String>,
}

/// A differing element.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Differing {
    /// Where; of a complex number with the part last.
    pub index: Vec<usize>,
    /// The first one's value.
    pub a: Scalar,
    /// The second one's value.
    pub b: Scalar,
    /// The first one's bits.
    pub a_bits: String,
    /// The second one's bits.
    pub b_bits: String,
    /// Numbers of the type from one to the other; none where one of them is NaN.
    pub ulps: Option<u64>,
}

/// Distances of elements that differ and are both numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ulps {
    /// The largest. Neighbours are 1 apart, -0 and +0 are 0 apart; for integers it is the difference.
    pub max: u64,
    /// Elements 0 or 1 apart.
    pub up_to_1: u64,
    /// 2 or 3.
    pub up_to_3: u64,
    /// 4 to 15.
    pub up_to_15: u64,
    /// 16 to 255.
    pub up_to_255: u64,
    /// More.
    pub more: u64,
}

impl Ulps {
    /// The counts with the upper ends of their ranges.
    #[must_use]
    pub fn ranges(&self) -> [(u64, u64); 5] {
        let counts = [self.up_to_1, self.up_to_3, self.up_to_15, self.up_to_255, self.more];
        std::array::from_fn(|index| (RANGES[index], counts[index]))
    }

    pub(super) fn count(&mut self, ulps: u64) {
        self.max = self.max.max(ulps);
        let range = match ulps {
            0..=1 => &mut self.up_to_1,
            2..=3 => &mut self.up_to_3,
            4..=15 => &mut self.up_to_15,
            16..=255 => &mut self.up_to_255,
            _ => &mut self.more,
        };
        *range += 1;
    }

    pub(super) fn join(&mut self, other: &Self) {
        self.max = self.max.max(other.max);
        self.up_to_1 += other.up_to_1;
        self.up_to_3 += other.up_to_3;
        self.up_to_15 += other.up_to_15;
        self.up_to_255 += other.up_to_255;
        self.more += other.more;
    }
}

/// What differing elements have in common: counts of elements.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Patterns {
    /// The second one is exactly half of the first: a sum that lost one of two equal parts, or an average of one.
    pub exactly_half: u64,
    /// The second one is exactly twice the first.
    pub exactly_double: u64,
    /// The second one is zero and the first is not.
    pub zero_in_b: u64,
    /// The first one is zero and the second is not.
    pub zero_in_a: u64,
    /// One is the other with its sign changed, zeros included.
    pub sign: u64,
    /// One of the two is NaN.
    pub one_nan: u64,
    /// Both are NaN, with other bits.
    pub both_nan: u64,
}

impl Patterns {
    /// Counts a pair of numbers that differ.
    pub(super) fn count(&mut self, a: f64, b: f64) {
        if a == -b {
            self.sign += 1;
        } else if b == 0.0 {
            self.zero_in_b += 1;
        } else if a == 0.0 {
            self.zero_in_a += 1;
        } else if a.is_finite() && a * 0.5 == b {
            self.exactly_half += 1;
        } else if a.is_finite() && a * 2.0 == b {
            self.exactly_double += 1;
        }
    }

    pub(super) fn join(&mut self, other: &Self) {
        self.exactly_half += other.exactly_half;
        self.exactly_double += other.exactly_double;
        self.zero_in_b += other.zero_in_b;
        self.zero_in_a += other.zero_in_a;
        self.sign += other.sign;
        self.one_nan += other.one_nan;
        self.both_nan += other.both_nan;
    }
}
