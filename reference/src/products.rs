//! Integer products that are not computed twice. The INT32 sums of a projection change only where its INT8 codes
//! do, and integers add exactly in any order: sums of an earlier run, brought up to date for the codes that differ,
//! are the sums of the new run.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ndarray::parallel::prelude::*;
use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis};
use pulp::{Arch, NullaryFnOnce};

use crate::kernels::{Block, distinct_rows, matmul_i8};
use crate::tensor::TensorId;

/// A row is brought up to date while no more than one in this many of its codes differ. One code costs a pass over
/// one row of the weight, so that sixteen such rows cost about what reading the whole weight does.
const CHANGED: usize = 16;
/// Output columns of one task.
const TILE: usize = 128;

/// The sums of one layer's projections as they were first computed. It may be shared by every run over the same
/// weights, whatever their codes: what it gives are the exact sums. It is made for one layer and dropped with it.
#[derive(Debug, Default)]
pub struct Products {
    held: Mutex<BTreeMap<TensorId, Arc<Held>>>,
}

/// One product.
#[derive(Debug)]
struct Held {
    /// INT8 codes, `[rows, K]`.
    codes: Array2<i8>,
    /// Their sums, `[rows, N]`.
    sums: Array2<i32>,
    /// Where the weight lies: another one is not mistaken for it.
    weight: Place,
}

/// Where a matrix lies in memory, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    address: usize,
    shape: (usize, usize),
    strides: [isize; 2],
}

impl Place {
    fn of(w: ArrayView2<'_, i8>) -> Self {
        let strides = w.strides();
        Self { address: w.as_ptr().addr(), shape: w.dim(), strides: [strides[0], strides[1]] }
    }
}

impl Products {
    /// No product yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// `codes @ weight` of the projection that writes `id`, INT32 `[rows, N]`; `weight` is INT8 `[K, N]` in either
    /// layout, `codes` holds no -128.
    #[must_use]
    pub fn sums(&self, id: TensorId, codes: ArrayView2<'_, i8>, weight: ArrayView2<'_, i8>) -> Array2<i32> {
        let place = Place::of(weight);
        let held = self.held().get(&id).map(Arc::clone);
        match held {
            Some(held) if held.weight == place && held.codes.dim() == codes.dim() => held.updated(codes, weight),
            Some(_) => matmul_i8(codes, weight),
            None => {
                // Not under the lock: two runs that come first at once both compute, and one of them is kept.
                let sums = matmul_i8(codes, weight);
                let first = Held { codes: codes.to_owned(), sums: sums.clone(), weight: place };
                self.held().entry(id).or_insert_with(|| Arc::new(first));
                sums
            }
        }
    }

    /// Whole after every change, so that a panic elsewhere leaves it usable.
    fn held(&self) -> MutexGuard<'_, BTreeMap<TensorId, Arc<Held>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// The sums of other codes over the same weight. Equal rows are computed once, rows in which few codes changed
    /// are brought up to date, the others are multiplied anew.
    fn updated(&self, codes: ArrayView2<'_, i8>, weight: ArrayView2<'_, i8>) -> Array2<i32> {
        let (of_row, first) = distinct_rows(codes);
        let mut sums = self.sums.select(Axis(0), &first);
        let mut changes: Vec<Vec<Change>> =
            first.iter().map(|&row| changes(self.codes.row(row), codes.row(row))).collect();
        let most = codes.ncols() / CHANGED;
        let anew: Vec<usize> = (0..first.len()).filter(|&row| changes[row].len() > most).collect();
        if !anew.is_empty() {
            let rows: Vec<usize> = anew.iter().map(|&row| first[row]).collect();
            let products = matmul_i8(codes.select(Axis(0), &rows).view(), weight);
            for (&row, product) in anew.iter().zip(products.rows()) {
                sums.row_mut(row).assign(&product);
                changes[row].clear();
            }
        }
        update(&mut sums, &changes, weight);
        sums.select(Axis(0), &of_row)
    }
}

/// A code that changed.
#[derive(Clone, Copy, Debug)]
struct Change {
    /// Its place in the row.
    k: usize,
    /// New minus old.
    delta: i32,
}

fn changes(old: ArrayView1<'_, i8>, new: ArrayView1<'_, i8>) -> Vec<Change> {
    let pairs = old.iter().zip(new).enumerate().filter(|(_, (old, new))| old != new);
    pairs.map(|(k, (&old, &new))| Change { k, delta: i32::from(new) - i32::from(old) }).collect()
}

/// Adds `delta * w[k, :]` of each row's changes to the row, `w` INT8 `[K, N]` in either layout.
fn update(sums: &mut Array2<i32>, changes: &[Vec<Change>], w: ArrayView2<'_, i8>) {
    if changes.iter().all(Vec::is_empty) {
        return;
    }
    let (columns, outputs) = (Block::new(w), Block::new(w.reversed_axes()));
    if columns.is_none() && outputs.is_none() {
        return update(sums, changes, w.as_standard_layout().view());
    }
    let arch = Arch::new();
    sums.axis_chunks_iter_mut(Axis(1), TILE).into_par_iter().enumerate().for_each(|(tile, sums)| {
        let (start, width) = (tile * TILE, sums.ncols());
        match (columns, outputs) {
            (Some(w), _) => arch.dispatch(Columns { sums, changes, w: w.some_columns(start, width) }),
            (None, Some(w)) => outputs_tile(sums, changes, w.some_rows(start, width)),
            (None, None) => {}
        }
    });
}

/// Some output columns of [`update`], weights `[K, N]`.
struct Columns<'a, 'w> {
    sums: ArrayViewMut2<'a, i32>,
    changes: &'a [Vec<Change>],
    w: Block<'w, i8>,
}

impl NullaryFnOnce for Columns<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn call(mut self) {
        for (row, changes) in self.changes.iter().enumerate() {
            let mut sums = self.sums.row_mut(row);
            for &Change { k, delta } in changes {
                let w = self.w.row(k);
                match sums.as_slice_mut() {
                    Some(sums) => sums.iter_mut().zip(w).for_each(|(sum, &w)| *sum += delta * i32::from(w)),
                    None => sums.iter_mut().zip(w).for_each(|(sum, &w)| *sum += delta * i32::from(w)),
                }
            }
        }
    }
}

/// Some output columns of [`update`], weights `[N, K]`.
fn outputs_tile(mut sums: ArrayViewMut2<'_, i32>, changes: &[Vec<Change>], w: Block<'_, i8>) {
    for (n, mut sums) in sums.columns_mut().into_iter().enumerate() {
        let w = w.row(n);
        for (sum, changes) in sums.iter_mut().zip(changes) {
            *sum += changes.iter().map(|change| change.delta * i32::from(w[change.k])).sum::<i32>();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elementary::mix;
    use proptest::prelude::*;

    fn codes(rows: usize, columns: usize, seed: u64) -> Array2<i8> {
        Array2::from_shape_fn((rows, columns), |(r, c)| mix(seed ^ ((r * columns + c) as u64)) as i8)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn updated_sums_are_the_recomputed_ones(
            rows in 1usize..17, depth in 1usize..200, columns in 1usize..400, changed in 0usize..40, seed: u64, transposed: bool,
        ) {
            let old = codes(rows, depth, seed).mapv(|code| code.max(-127));
            let weight = codes(depth, columns, !seed);
            let stored = weight.t().as_standard_layout().into_owned();
            let weight = if transposed { stored.t() } else { weight.view() };
            let held = Held { codes: old.clone(), sums: matmul_i8(old.view(), weight), weight: Place::of(weight) };

            // Changes in any row, from none to all of its codes, and one row that equals another.
            let mut new = old;
            for i in 0..changed {
                let z = mix(seed.wrapping_add(i as u64));
                new[(z as usize % rows, (z >> 20) as usize % depth)] = ((z >> 50) as i8).max(-127);
            }
            let row = new.row(rows - 1).to_owned();
            new.row_mut(0).assign(&row);
            prop_assert_eq!(held.updated(new.view(), weight), matmul_i8(new.view(), weight));

            // The same by additions alone, however many codes changed.
            let changes: Vec<_> = (0..rows).map(|row| changes(held.codes.row(row), new.row(row))).collect();
            let mut sums = held.sums.clone();
            update(&mut sums, &changes, weight);
            prop_assert_eq!(sums, matmul_i8(new.view(), weight));
        }
    }

    #[test]
    fn another_weight_is_not_mistaken_for_the_first() {
        let (x, products) = (codes(3, 40, 1).mapv(|code| code.max(-127)), Products::new());
        let (a, b) = (codes(40, 7, 2), codes(40, 7, 3));
        for weight in [&a, &b, &a] {
            let sums = products.sums(TensorId::QProj, x.view(), weight.view());
            assert_eq!(sums, matmul_i8(x.view(), weight.view()));
        }
    }
}
