//! Orders in which an FP32 sum may run.

use std::sync::Arc;

use crate::elementary::mix;
use crate::policy::Freedom;

/// Virtual lanes of the canonical order.
pub const LANES: usize = 8;
/// Terms that a lane adds one after the other before it begins again.
pub const RUN: usize = 16;
/// Terms of one run of every lane.
pub(super) const RUNS: usize = LANES * RUN;

/// The order of one FP32 sum over `n` terms.
#[derive(Clone, Debug)]
pub enum SumOrder {
    /// Eight lanes of runs, and a tree of adjacent pairs (`docs/numerics.md`, Order of the reference).
    Canonical,
    /// One accumulator, terms in this order.
    Permuted(Arc<[u32]>),
    /// The emulated device's vector unit: columns by chunk, 64 lanes a chunk, a tree of adjacent
    /// pairs; chunks added in order.
    VectorChunks(usize),
    /// The emulated device's cube unit: `acc = f32(acc + exact dot of the next 16)`.
    Cube,
}

impl SumOrder {
    /// The order of a vector-unit sum of `n` terms, `chunk` columns at a time on the emulated device.
    #[must_use]
    pub fn vector(freedom: Freedom, n: usize, chunk: usize) -> Self {
        match freedom {
            Freedom::Canonical => Self::Canonical,
            Freedom::Emulated => Self::VectorChunks(chunk),
            Freedom::Sampled { seed } | Freedom::Enlarged { seed, .. } => Self::Permuted(permutation(n, seed)),
        }
    }

    /// The order of a cube-unit sum of `n` products.
    #[must_use]
    pub fn cube(freedom: Freedom, n: usize) -> Self {
        match freedom {
            Freedom::Canonical => Self::Canonical,
            Freedom::Emulated => Self::Cube,
            Freedom::Sampled { seed } | Freedom::Enlarged { seed, .. } => Self::Permuted(permutation(n, seed)),
        }
    }

    /// The FP32 sum of `term(0..n)` in this order. `term` must be exact in FP32.
    #[inline]
    pub fn sum(&self, n: usize, term: impl Fn(usize) -> f32) -> f32 {
        match self {
            Self::Canonical => canonical(n, |sum, i| sum + term(i)),
            Self::Permuted(order) => order.iter().fold(0.0, |sum, &i| sum + term(i as usize)),
            Self::VectorChunks(chunk) => {
                let mut total = 0.0f32;
                for start in (0..n).step_by((*chunk).max(1)) {
                    let mut lanes = [0.0f32; 64];
                    for i in start..n.min(start + chunk) {
                        lanes[(i - start) % 64] += term(i);
                    }
                    total += tree(&mut lanes);
                }
                total
            }
            Self::Cube => {
                let mut acc = 0.0f32;
                for start in (0..n).step_by(16) {
                    let dot: f64 = (start..n.min(start + 16)).map(|i| f64::from(term(i))).sum();
                    acc = (f64::from(acc) + dot) as f32;
                }
                acc
            }
        }
    }
}

/// The canonical sum of `n` terms; `add(sum, i)` adds term `i` to a sum.
#[inline(always)]
pub(super) fn canonical(n: usize, add: impl Fn(f32, usize) -> f32) -> f32 {
    let run = |start: usize| {
        let mut lanes = [0f32; LANES];
        let (start, end) = (n.min(start), n.min(start + RUNS));
        let whole = end - (end - start) % LANES;
        for base in (start..whole).step_by(LANES) {
            for (lane, sum) in lanes.iter_mut().enumerate() {
                *sum = add(*sum, base + lane);
            }
        }
        for (i, sum) in (whole..end).zip(&mut lanes) {
            *sum = add(*sum, i);
        }
        lanes
    };
    let mut lanes = [0f32; LANES];
    for start in (0..n).step_by(2 * RUNS) {
        for (lane, (first, second)) in lanes.iter_mut().zip(run(start).into_iter().zip(run(start + RUNS))) {
            *lane += first + second;
        }
    }
    tree(&mut lanes)
}

/// Adds adjacent pairs until one value is left. The length is a power of two.
#[inline]
pub(super) fn tree(lanes: &mut [f32]) -> f32 {
    let mut width = lanes.len();
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
        }
    }
    lanes[0]
}

/// The canonical sums of many columns at once, whose lanes stand apart: `sums` holds for each lane and row, lane by lane,
/// what the lane has and the first of two runs, which is still to be added where the runs are `odd`. What the lanes of a
/// row give stands in its lane 0.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn tree_of_columns<V: Copy>(sums: &mut [[V; 2]], rows: usize, odd: bool, add: impl Fn(V, V) -> V) {
    if odd {
        for [sum, first] in &mut *sums {
            *sum = add(*sum, *first);
        }
    }
    let mut live = LANES;
    while live > 1 {
        live /= 2;
        for lane in 0..live {
            for row in 0..rows {
                let ([a, _], [b, _]) = (sums[2 * lane * rows + row], sums[(2 * lane + 1) * rows + row]);
                sums[lane * rows + row][0] = add(a, b);
            }
        }
    }
}

/// A permutation of `0..n` drawn from the seed (Fisher-Yates).
fn permutation(n: usize, seed: u64) -> Arc<[u32]> {
    let mut order: Vec<u32> = (0..n as u32).collect();
    let mut state = mix(seed ^ n as u64);
    for i in (1..n).rev() {
        state = mix(state);
        order.swap(i, (state % (i as u64 + 1)) as usize);
    }
    order.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn canonical_order_is_eight_lanes_of_runs_and_a_tree() {
        // 1 + 2^-24 is lost in FP32 unless the small terms meet each other first.
        let tiny = f32::EPSILON / 2.0;
        let terms: [f32; 10] = [1.0, tiny, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, tiny];
        // Lane 1 holds both small terms, so that they survive.
        assert_eq!(SumOrder::Canonical.sum(10, |i| terms[i]), 1.0 + f32::EPSILON);
        let sequential = SumOrder::Permuted((0..10).collect::<Vec<u32>>().into());
        assert_eq!(sequential.sum(10, |i| terms[i]), 1.0);
        // Term 128 of lane 0 begins a run, and meets 256, the first of the next pair, only in the lane.
        let sum = |places: &[usize]| {
            SumOrder::Canonical.sum(400, |i| {
                if i == 0 {
                    1.0
                } else if places.contains(&i) {
                    tiny
                } else {
                    0.0
                }
            })
        };
        assert_eq!(sum(&[120]), 1.0);
        assert_eq!(sum(&[128, 136]), 1.0 + f32::EPSILON);
        assert_eq!(sum(&[120, 128]), 1.0);
        assert_eq!(sum(&[248, 256]), 1.0);
        assert_eq!(sum(&[256, 384]), 1.0 + f32::EPSILON);
    }

    #[test]
    fn a_canonical_sum_is_never_negative_zero() {
        for n in [0, 1, 7, 8, 128, 129, 300] {
            assert_eq!(SumOrder::Canonical.sum(n, |_| -0.0).to_bits(), 0);
        }
    }

    #[test]
    fn permutations_hold_every_index_and_depend_on_the_seed() {
        let mut order = permutation(1000, 7).to_vec();
        assert_ne!(order, permutation(1000, 8).to_vec());
        order.sort_unstable();
        assert_eq!(order, (0..1000).collect::<Vec<u32>>());
    }

    proptest! {
        #[test]
        fn every_order_adds_small_integers_exactly(terms in prop::collection::vec(-1000i32..1000, 0..300), seed: u64) {
            let exact = terms.iter().sum::<i32>() as f32;
            for freedom in [Freedom::Canonical, Freedom::Emulated, Freedom::Sampled { seed }] {
                for order in [SumOrder::vector(freedom, terms.len(), 128), SumOrder::cube(freedom, terms.len())] {
                    prop_assert_eq!(order.sum(terms.len(), |i| terms[i] as f32), exact);
                }
            }
        }
    }
}
