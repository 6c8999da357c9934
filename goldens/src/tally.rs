//! From marks to a report: counts, places and the worst elements of one compared tensor.

use std::collections::BTreeSet;
use std::sync::Arc;

use ndarray::Array2;
use reference::inputs::cache_place;
use reference::{DType, LayerInputs, PAGE, Tensor, TensorId};

use crate::Mark;
use crate::evidence::CacheEvidence;
use crate::place::place;
use crate::report::{Element, Located, Number, TensorReport, Verdict};

/// Elements listed as the worst.
const WORST: usize = 5;

/// One tensor, compared.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Which tensor.
    pub id: TensorId,
    /// Whether its stage was recomputed from the device's own inputs to it.
    pub forced: bool,
    /// What the device gave.
    pub device: Arc<Tensor>,
    /// What the contract gives under the rules in force.
    pub reference: Arc<Tensor>,
    /// The mark of each element.
    pub marks: Array2<Mark>,
    /// Of an unforced tensor, the sum over rows of their energies: how far the device is from the nominal run.
    pub energy: f64,
    /// A failure that no single element shows, such as a violated rounding rule.
    pub violated: bool,
    /// What is to be said of it.
    pub notes: Vec<String>,
}

impl Comparison {
    /// Whether it holds drift.
    pub fn drifts(&self) -> bool {
        self.marks.iter().any(|&mark| mark == Mark::Drift)
    }

    /// Whether it fails.
    pub fn fails(&self) -> bool {
        self.violated || self.drifts()
    }

    /// Elements with a mark.
    pub fn count(&self, mark: Mark) -> u64 {
        self.marks.iter().filter(|&&m| m == mark).count() as u64
    }

    /// Physical rows of the batch that hold drift.
    pub fn drifting_rows(&self, inputs: &LayerInputs<'_>) -> Vec<usize> {
        let rows: BTreeSet<usize> = self
            .marks
            .indexed_iter()
            .filter(|(_, mark)| **mark == Mark::Drift)
            .map(|((row, column), _)| place(self.id, inputs.geometry, row, column).row)
            .collect();
        rows.into_iter().collect()
    }

    /// The report on it. `cache` gives written rows their place in the capture.
    pub fn report(&self, inputs: &LayerInputs<'_>, cache: Option<&CacheEvidence>) -> TensorReport {
        let geometry = inputs.geometry;
        let drift = self.count(Mark::Drift);
        let (flips, ties) = (self.count(Mark::Flip), self.count(Mark::Tie));
        let shown = if drift > 0 {
            Mark::Drift
        } else if ties > 0 {
            Mark::Tie
        } else {
            Mark::Flip
        };
        let mut rows = BTreeSet::new();
        let mut heads = BTreeSet::new();
        let mut pages = BTreeSet::new();
        let mut worst: Vec<(f64, usize, usize)> = Vec::new();
        let (mut nonfinite, mut half, mut elements) = (0, 0, 0);
        for ((row, column), &mark) in self.marks.indexed_iter() {
            if mark == Mark::Skipped {
                continue;
            }
            elements += 1;
            let (device, reference) = (self.device.get(row, column), self.reference.get(row, column));
            if !device.is_finite() {
                nonfinite += 1;
            }
            if mark == Mark::Drift {
                let at = place(self.id, geometry, row, column);
                rows.insert(at.row);
                heads.extend(at.head);
                if matches!(self.id, TensorId::KRows | TensorId::VRows) {
                    pages.insert(inputs.batch.slots[at.row] / PAGE);
                }
                half += u64::from(reference != 0.0 && f64::from(device) * 2.0 == f64::from(reference));
            }
            if mark == shown {
                worst.push((difference(device, reference), row, column));
            }
        }
        let first = worst.first().filter(|_| shown != Mark::Flip);
        let first = first.map(|&(_, row, column)| self.located(row, column, inputs, cache));
        // The largest first; equal ones in index order.
        worst.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        worst.truncate(WORST);
        let worst: Vec<Element> =
            worst.into_iter().map(|(_, row, column)| self.element(row, column, inputs, cache)).collect();
        TensorReport {
            name: self.id.name().to_owned(),
            verdict: if self.fails() { Verdict::Fail } else { Verdict::Pass },
            forced: self.forced,
            elements,
            exact: self.count(Mark::Exact),
            explained: flips + ties,
            explained_flips: flips,
            explained_ties: ties,
            unexplained: drift,
            nonfinite,
            exactly_half: half,
            worst: worst.first().cloned(),
            worst_elements: if drift > 0 { worst } else { Vec::new() },
            first,
            rows_failing: rows.into_iter().collect(),
            heads_failing: heads.into_iter().collect(),
            pages_failing: pages.into_iter().collect(),
            notes: self.notes.clone(),
            map: None,
        }
    }

    fn located(&self, row: usize, column: usize, inputs: &LayerInputs<'_>, cache: Option<&CacheEvidence>) -> Located {
        let at = place(self.id, inputs.geometry, row, column);
        let slot = matches!(self.id, TensorId::KRows | TensorId::VRows).then(|| inputs.batch.slots[at.row]);
        Located {
            element: self.element(row, column, inputs, cache),
            row: at.row,
            head: at.head,
            channel: at.head.map(|_| column % inputs.geometry.head_dim),
            page: slot.map(|slot| slot / PAGE),
            slot,
        }
    }

    fn element(&self, row: usize, column: usize, inputs: &LayerInputs<'_>, cache: Option<&CacheEvidence>) -> Element {
        let dim = inputs.geometry.head_dim;
        let index = match self.id {
            TensorId::InvRmsStates => vec![row],
            TensorId::KRows | TensorId::VRows => {
                let cache_row = reference::inputs::cache_row(inputs.geometry, inputs.batch.slots[row], column / dim);
                let position = cache.and_then(|cache| cache.position.get(&cache_row).copied());
                vec![position.unwrap_or(cache_row), column % dim]
            }
            _ => vec![row, column],
        };
        let (device, reference) = (self.device.get(row, column), self.reference.get(row, column));
        let (device_bits, reference_bits) = (self.device.bits(row, column), self.reference.bits(row, column));
        let dtype = self.id.dtype();
        let width = dtype.size() * 2;
        Element {
            index,
            device: Number(f64::from(device)),
            reference: Number(f64::from(reference)),
            device_bits: format!("0x{device_bits:0width$x}"),
            reference_bits: format!("0x{reference_bits:0width$x}"),
            ulps: (device.is_finite() && reference.is_finite()).then(|| ulps(dtype, device_bits, reference_bits)),
        }
    }
}

/// How far apart two values are, for ordering: a difference in finiteness comes first.
fn difference(device: f32, reference: f32) -> f64 {
    if device.is_finite() && reference.is_finite() {
        (f64::from(device) - f64::from(reference)).abs()
    } else {
        f64::INFINITY
    }
}

/// Distance in units in the last place: steps between neighbours of the type.
pub fn ulps(dtype: DType, a: u32, b: u32) -> u64 {
    let sign = match dtype {
        DType::I8 => return u64::from((a as u8 as i8).abs_diff(b as u8 as i8)),
        DType::Bf16 => 1u32 << 15,
        _ => 1u32 << 31,
    };
    let ordered = |x: u32| if x & sign == 0 { i64::from(x) } else { -i64::from(x & !sign) };
    ordered(a).abs_diff(ordered(b))
}

/// Names a cache row: `page 41, slot 5375 (offset 127), KV head 2`.
pub fn cache_row_name(inputs: &LayerInputs<'_>, row: usize) -> String {
    let (slot, head) = cache_place(inputs.geometry, row);
    format!("page {}, slot {slot} (offset {}), KV head {head}", slot / PAGE, slot % PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ulps_cross_zero() {
        assert_eq!(ulps(DType::F32, 0x8000_0001, 1), 2);
        assert_eq!(ulps(DType::Bf16, 0x3F80, 0x3F81), 1);
        assert_eq!(ulps(DType::I8, 0x80, 0x7F), 255);
        assert_eq!(ulps(DType::F32, 0x8000_0000, 0), 0);
    }
}
