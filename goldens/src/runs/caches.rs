//! The caches that a run left: which rows it wrote, and what each place holds in every layer.

use std::collections::{BTreeMap, BTreeSet};

use device::{Captured, WrittenRows};
use half::bf16;
use ndarray::{Array2, ArrayView1, ArrayView2, s};

use super::plan::Plan;
use crate::checks::{final_hash, row_element};
use crate::place::number;
use crate::report::{Element, TensorReport, Verdict};

/// Where one of the run's cache rows belongs: its layer, the index of its place and its KV head.
pub type At = (usize, usize, usize);

/// One cache over all layers.
#[derive(Debug)]
pub struct RunCache<'a> {
    before: ArrayView2<'a, bf16>,
    /// Position in the capture of each cache row it lists; rows out of range are not in it.
    position: BTreeMap<usize, usize>,
    out_of_range: Vec<i64>,
    repeated: Vec<usize>,
    values: &'a Array2<bf16>,
    /// By layer, what each place holds after the run: `[places, KV*D]`.
    pub held: Vec<Array2<bf16>>,
}

impl<'a> RunCache<'a> {
    /// Reads written rows over the caches before the run. `Err` names a type that is not the contract's.
    pub fn new(plan: &Plan<'_>, written: &'a WrittenRows, before: ArrayView2<'a, bf16>) -> Result<Self, String> {
        let rows = match &written.rows {
            Captured::Values(rows) => rows,
            Captured::WrongDType { found, .. } => {
                return Err(format!("rows have element type {found}, where the contract has INT64"));
            }
        };
        let values = match &written.values {
            Captured::Values(values) => values,
            Captured::WrongDType { found, .. } => {
                return Err(format!("element type {found}, where the contract has BF16"));
            }
        };
        let mut position = BTreeMap::new();
        let (mut out_of_range, mut repeated) = (Vec::new(), Vec::new());
        for (index, &row) in rows.iter().enumerate() {
            match usize::try_from(row).ok().filter(|&row| row < before.nrows().min(plan.cache_rows())) {
                Some(row) => {
                    if position.insert(row, index).is_some() {
                        repeated.push(row);
                    }
                }
                None => out_of_range.push(row),
            }
        }
        let mut cache = Self { before, position, out_of_range, repeated, values, held: Vec::new() };
        cache.held = (0..plan.layers).map(|layer| cache.layer(plan, layer)).collect();
        Ok(cache)
    }

    fn layer(&self, plan: &Plan<'_>, layer: usize) -> Array2<bf16> {
        let dim = plan.geometry.head_dim;
        let mut held = Array2::from_elem((plan.places.len(), plan.geometry.kv_width()), bf16::ZERO);
        for (index, &place) in plan.places.iter().enumerate() {
            for kv_head in 0..plan.geometry.num_key_value_heads {
                let row = plan.cache_row(layer, place, kv_head);
                let value = match self.position.get(&row) {
                    Some(&at) => self.values.row(at),
                    None => self.before.row(row),
                };
                held.slice_mut(s![index, kv_head * dim..(kv_head + 1) * dim]).assign(&value);
            }
        }
        held
    }

    /// Where in the capture a place's KV head is; `None` where its bytes are said not to have changed.
    pub fn listed(&self, plan: &Plan<'_>, layer: usize, index: usize, kv_head: usize) -> Option<usize> {
        self.position.get(&plan.cache_row(layer, plan.places[index], kv_head)).copied()
    }

    /// Every row of the capture: where it belongs, when it is one of the run's, and its values. A row that is listed again later is none of the run's.
    pub fn each(&self, plan: &Plan<'_>) -> Vec<(Option<At>, ArrayView1<'a, bf16>)> {
        let written = plan.written();
        let of: BTreeMap<usize, usize> = self.position.iter().map(|(&row, &at)| (at, row)).collect();
        let at = |index: usize| of.get(&index).and_then(|row| written.get(row)).copied();
        let values: &'a Array2<bf16> = self.values;
        values.rows().into_iter().enumerate().map(|(index, values)| (at(index), values)).collect()
    }

    /// The report on the rows written: exactly those of the run's places. A row that is not listed was rightly so where
    /// `unchanged(layer, place, head)` holds: the bytes that belong there were there before.
    pub fn rows_report(
        &self,
        name: &str,
        plan: &Plan<'_>,
        unchanged: impl Fn(usize, usize, usize) -> bool,
    ) -> TensorReport {
        let expected = plan.written();
        let missing: Vec<usize> = expected
            .iter()
            .filter(|&(row, &(layer, index, head))| !self.position.contains_key(row) && !unchanged(layer, index, head))
            .map(|(&row, _)| row)
            .collect();
        let unexpected: Vec<usize> = self.position.keys().copied().filter(|row| !expected.contains_key(row)).collect();
        let wrong = missing.len().max(unexpected.len()) + self.out_of_range.len() + self.repeated.len();
        let named = |rows: &[usize]| {
            let mut names: Vec<String> =
                rows.iter().take(3).map(|&row| format!("row {row} ({})", plan.cache_row_name(row))).collect();
            if rows.len() > 3 {
                names.push(format!("and {} more", rows.len() - 3));
            }
            names.join(", ")
        };
        let mut notes = Vec::new();
        if !unexpected.is_empty() {
            let rows = number(unexpected.len(), "cache row", "cache rows");
            notes.push(format!("{rows} written that no token of this run has: {}", named(&unexpected)));
        }
        if !missing.is_empty() {
            let rows = number(missing.len(), "cache row", "cache rows");
            let places: Vec<usize> = missing.iter().filter_map(|row| expected.get(row)).map(|at| at.1).collect();
            let mut distinct = places.clone();
            distinct.dedup();
            notes.push(format!("{rows} not written: {}; {}", named(&missing), plan.names(&distinct)));
        }
        if !self.out_of_range.is_empty() {
            let some: Vec<i64> = self.out_of_range.iter().copied().take(8).collect();
            notes.push(format!(
                "{} outside the caches of {}: {some:?}",
                number(self.out_of_range.len(), "row", "rows"),
                self.before.nrows()
            ));
        }
        if !self.repeated.is_empty() {
            notes.push(format!("listed more than once: {}", named(&self.repeated)));
        }
        // Rows written where none belongs beside rows that were missed, then rows that do not exist.
        let pairs = (0..missing.len().max(unexpected.len())).map(|i| (unexpected.get(i), missing.get(i)));
        let mut worst: Vec<Element> = pairs
            .take(5)
            .map(|(written, missed)| {
                let at = written.and_then(|row| self.position.get(row)).copied();
                row_element(at, written.map(|&row| row as i64), missed.map(|&row| row as i64))
            })
            .collect();
        worst.extend(self.out_of_range.iter().take(5).map(|&row| row_element(None, Some(row), None)));
        worst.truncate(5);
        let rows: BTreeSet<usize> =
            missing.iter().filter_map(|row| expected.get(row)).map(|at| plan.places[at.1].row).collect();
        let elements = (expected.len() + wrong.saturating_sub(missing.len())) as u64;
        TensorReport {
            forced: true,
            elements,
            exact: elements.saturating_sub(wrong as u64),
            unexplained: wrong as u64,
            worst: worst.first().cloned(),
            worst_elements: worst,
            rows_failing: rows.into_iter().collect(),
            notes,
            ..TensorReport::new(name, if wrong == 0 { Verdict::Pass } else { Verdict::Fail })
        }
    }

    /// SHA-256 of the whole caches after the run.
    pub fn sha256(&self) -> String {
        final_hash(self.before, &self.position, self.values.view())
    }
}
