//! Two tensors compared without knowing what made them: element type, shape and bits, and where bits differ how far apart
//! the numbers are. There is no tolerance: what a distance means is for the reader, and [`crate::judge`] judges kernels.

mod order;
mod report;

use rayon::prelude::*;
use safetensors::Dtype;

pub use report::{Differing, DumpDiff, Patterns, TensorDiff, Ulps};

use crate::elements::{Element, Work, with_type};
use crate::report::Verdict;

/// Bytes that one task compares; fixed, so that nothing depends on the thread count, and a multiple of every element.
const CHUNK: usize = 1 << 20;
/// Bytes that are looked at once for being all the same, and again, out of the nearest cache, where they are not.
const BLOCK: usize = 1 << 13;
/// Elements listed as the worst.
const WORST: usize = 5;
/// Upper ends of the ranges in which distances are counted.
const RANGES: [u64; 5] = [1, 3, 15, 255, u64::MAX];

/// One of two tensors.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost dimension first.
    pub shape: &'a [usize],
    /// Elements in logical row-major order, little-endian.
    pub bytes: &'a [u8],
}

/// Compares two tensors.
#[must_use]
pub fn compare(name: &str, a: &Side<'_>, b: &Side<'_>) -> TensorDiff {
    let mut diff = TensorDiff {
        name: name.to_owned(),
        verdict: Verdict::Fail,
        dtype: [a.dtype.to_string(), b.dtype.to_string()],
        shape: [a.shape.to_vec(), b.shape.to_vec()],
        elements: elements(a),
        differing: None,
        nonfinite: [nonfinite(a), nonfinite(b)],
        ulps: None,
        worst: Vec::new(),
        patterns: Patterns::default(),
        notes: Vec::new(),
    };
    if a.dtype != b.dtype || a.shape != b.shape {
        diff.notes = notes_on_other_kind(a, b);
        return diff;
    }
    let found = with_type(a.dtype, Compare { a: a.bytes, b: b.bytes });
    diff.differing = Some(found.differing);
    if found.differing == 0 && a.bytes.len() == b.bytes.len() {
        diff.verdict = Verdict::Pass;
        return diff;
    }
    diff.ulps = Some(found.ulps);
    diff.patterns = found.patterns;
    let parts = if a.dtype == Dtype::C64 { 2 } else { 1 };
    let mut shape = a.shape.to_vec();
    shape.extend((parts > 1).then_some(parts));
    diff.worst = found.worst.iter().map(|worst| worst.describe(&shape, a, b)).collect();
    diff.notes = notes_on_order(a, b);
    diff
}

/// Elements of a tensor; a complex number is one.
fn elements(side: &Side<'_>) -> u64 {
    (side.bytes.len() * 8 / side.dtype.bitsize().max(1)) as u64
}

fn nonfinite(side: &Side<'_>) -> u64 {
    struct Count<'a>(&'a [u8], usize);
    impl Work for Count<'_> {
        type Output = u64;
        fn run<T: Element>(self) -> u64 {
            let of = |element: &[u8]| element.chunks_exact(T::SIZE).any(|part| T::read(part).is_nonfinite());
            let chunks = self.0.par_chunks(CHUNK);
            chunks.map(|bytes| bytes.chunks_exact(T::SIZE * self.1).map(|one| u64::from(of(one))).sum::<u64>()).sum()
        }
    }
    with_type(side.dtype, Count(side.bytes, if side.dtype == Dtype::C64 { 2 } else { 1 }))
}

/// What can be said of tensors of different types or shapes.
fn notes_on_other_kind(a: &Side<'_>, b: &Side<'_>) -> Vec<String> {
    let mut notes = Vec::new();
    if a.bytes == b.bytes {
        notes.push("the bytes are the same".to_owned());
    }
    let reversed = a.shape.len() > 1 && a.shape.iter().eq(b.shape.iter().rev());
    if a.dtype == b.dtype && reversed {
        // The transposed tensor has in row-major order what the first one has in column-major order.
        if order::is_column_major_of(b.bytes, a.bytes, a.shape, a.dtype.bitsize() / 8) {
            notes.push("same values, transposed".to_owned());
        }
    }
    notes
}

/// What can be said of tensors of one type and shape whose bits differ.
fn notes_on_order(a: &Side<'_>, b: &Side<'_>) -> Vec<String> {
    let size = a.dtype.bitsize() / 8;
    let (of_a, of_b) = (
        order::is_column_major_of(b.bytes, a.bytes, a.shape, size),
        order::is_column_major_of(a.bytes, b.bytes, a.shape, size),
    );
    let note = match (of_a, of_b) {
        (true, true) => "same values, column-major order: one of the two was saved as it lay in memory",
        (true, false) => "same values, column-major order: the second was saved as it lay in memory",
        (false, true) => "same values, column-major order: the first was saved as it lay in memory",
        (false, false) => return Vec::new(),
    };
    vec![note.to_owned()]
}

/// What a comparison of elements found.
#[derive(Clone, Debug, Default)]
struct Found {
    differing: u64,
    ulps: Ulps,
    patterns: Patterns,
    /// The worst, worst first.
    worst: Vec<Worst>,
}

/// A differing element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Worst {
    at: usize,
    /// Distance; none where one of the two is NaN, which is worse than any.
    ulps: Option<u64>,
}

impl Worst {
    /// Order in which the worst are listed: NaN, then the furthest apart, then the first.
    fn rank(&self) -> (bool, std::cmp::Reverse<u64>, usize) {
        (self.ulps.is_some(), std::cmp::Reverse(self.ulps.unwrap_or(0)), self.at)
    }

    fn describe(&self, shape: &[usize], a: &Side<'_>, b: &Side<'_>) -> Differing {
        let mut index = vec![0; shape.len()];
        let mut rest = self.at;
        for (place, &size) in index.iter_mut().zip(shape).rev() {
            *place = rest % size.max(1);
            rest /= size.max(1);
        }
        let ([a, b], [a_bits, b_bits]) = with_type(a.dtype, Both { a: a.bytes, b: b.bytes, at: self.at });
        Differing { index, a, b, a_bits, b_bits, ulps: self.ulps }
    }
}

/// Both elements at a place: values and bits.
struct Both<'a> {
    a: &'a [u8],
    b: &'a [u8],
    at: usize,
}

impl Work for Both<'_> {
    type Output = ([crate::elements::Scalar; 2], [String; 2]);

    fn run<T: Element>(self) -> Self::Output {
        let read = |bytes: &[u8]| T::read(bytes.get(self.at * T::SIZE..).unwrap_or_default());
        let both = [read(self.a), read(self.b)];
        (both.map(T::value), both.map(|element| format!("0x{:0width$x}", element.bits(), width = 2 * T::SIZE)))
    }
}

/// The comparison of all elements.
struct Compare<'a> {
    a: &'a [u8],
    b: &'a [u8],
}

impl Work for Compare<'_> {
    type Output = Found;

    fn run<T: Element>(self) -> Found {
        let chunks = self.a.par_chunks(CHUNK).zip(self.b.par_chunks(CHUNK)).enumerate();
        let found: Vec<Found> = chunks.map(|(index, (a, b))| chunk::<T>(a, b, index * (CHUNK / T::SIZE))).collect();
        found.into_iter().fold(Found::default(), Found::with)
    }
}

fn chunk<T: Element>(a: &[u8], b: &[u8], first: usize) -> Found {
    let mut found = Found::default();
    for (block, (a, b)) in a.chunks(BLOCK).zip(b.chunks(BLOCK)).enumerate() {
        if a == b {
            continue;
        }
        let first = first + block * (BLOCK / T::SIZE);
        for (offset, (a, b)) in a.chunks_exact(T::SIZE).zip(b.chunks_exact(T::SIZE)).enumerate() {
            let (a, b) = (T::read(a), T::read(b));
            if a != b {
                found.add(a, b, first + offset);
            }
        }
    }
    found
}

impl Found {
    fn add<T: Element>(&mut self, a: T, b: T, at: usize) {
        self.differing += 1;
        let ulps = a.place().zip(b.place()).map(|(a, b)| a.abs_diff(b));
        match (ulps, a.place().is_none() && b.place().is_none()) {
            (None, true) => self.patterns.both_nan += 1,
            (None, false) => self.patterns.one_nan += 1,
            (Some(ulps), _) => {
                self.ulps.count(ulps);
                self.patterns.count(a.value().as_f64(), b.value().as_f64());
            }
        }
        // Two NaNs of other bits are no distance apart that anybody would look for.
        let both_nan = ulps.is_none() && a.place().is_none() && b.place().is_none();
        let worst = Worst { at, ulps: if both_nan { Some(0) } else { ulps } };
        if self.worst.len() < WORST || self.worst.last().is_some_and(|last| worst.rank() < last.rank()) {
            let place = self.worst.partition_point(|other| other.rank() <= worst.rank());
            self.worst.insert(place, worst);
            self.worst.truncate(WORST);
        }
    }

    fn with(mut self, other: Self) -> Self {
        self.differing += other.differing;
        self.ulps.join(&other.ulps);
        self.patterns.join(&other.patterns);
        self.worst.extend(other.worst);
        self.worst.sort_by_key(Worst::rank);
        self.worst.truncate(WORST);
        self
    }
}

#[cfg(test)]
mod tests;
