//! Rounding flips behind a gap that move codes. A BF16 row that is quantized after a stage with freedom takes such a flip
//! seldom, but one changed code moves much of everything after it: right devices then lie at few places far from each other,
//! and close to one of them each. What moves no code moves little (`docs/verdicts.md`, Unforced).

use std::collections::BTreeMap;

use half::bf16;
use ndarray::ArrayView2;
use reference::{Tensor, TensorId, Trace};

/// Tensors that are narrowed behind a stage with freedom and then quantized row by row, with their codes; in the contract's
/// order.
pub const QUANTIZED: [(TensorId, TensorId); 2] =
    [(TensorId::AttnOut, TensorId::AttnOutI8), (TensorId::MlpNormIn, TensorId::MlpNormI8)];

/// Most places at which one row's right devices may lie; where there are more, rows spread so far that their distances from
/// the nominal run say as much.
const MOST: usize = 128;

/// Events that are combined with each other freely.
const FREQUENT: usize = 4;

/// An element that another device narrows to another value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flip {
    column: usize,
    bits: u16,
}

/// Flips of one batch row in each tensor of [`QUANTIZED`].
pub type Flips = [Vec<Flip>; QUANTIZED.len()];

/// The flips of one row of `other` against `base` in one tensor of [`QUANTIZED`] that change codes: their own, or all codes
/// of the row because its largest magnitude is another one.
pub fn flips(base: &Trace, other: &Trace, place: usize, row: usize) -> Vec<Flip> {
    let (values, codes) = QUANTIZED[place];
    let (base_values, other_values) = (base.bf16(values), other.bf16(values));
    let (base_codes, other_codes) = (base.i8(codes), other.i8(codes));
    let magnitude = |value: &bf16| value.to_bits() & 0x7FFF;
    let peak = |values: &ArrayView2<'_, bf16>| values.row(row).iter().map(magnitude).max().unwrap_or(0);
    let peaks = (peak(&base_values), peak(&other_values));
    let lower = peaks.0.min(peaks.1);
    let flip = |column: usize| {
        let (base, other) = (base_values[(row, column)], other_values[(row, column)]);
        let moves = match peaks.0 == peaks.1 {
            true => base_codes[(row, column)] != other_codes[(row, column)],
            false => magnitude(&base).max(magnitude(&other)) >= lower,
        };
        (moves && base.to_bits() != other.to_bits()).then_some(Flip { column, bits: other.to_bits() })
    };
    (0..base_values.ncols()).filter_map(flip).collect()
}

/// A tensor with these flips; none where there are none.
pub fn flipped(tensor: &Tensor, place: usize, rows: &[Flips]) -> Option<Tensor> {
    let Tensor::Bf16(values) = tensor else { return None };
    let mut values = values.clone();
    let mut changed = false;
    for (row, flips) in rows.iter().enumerate() {
        for flip in &flips[place] {
            if let Some(value) = values.get_mut((row, flip.column)) {
                *value = bf16::from_bits(flip.bits);
                changed = true;
            }
        }
    }
    changed.then_some(Tensor::Bf16(values))
}

/// Flips of one row, each with the devices that had it.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    devices: BTreeMap<Flip, Vec<usize>>,
}

impl Seen {
    /// Adds those of one device.
    pub fn add(&mut self, device: usize, flips: &[Flip]) {
        flips.iter().for_each(|&flip| self.devices.entry(flip).or_default().push(device));
    }

    /// Combinations of what more than one device had, the empty one first: any of the most frequent events, and at most one
    /// of the others, which right devices hardly ever take. None where `times` as many would be too many. Flips that only
    /// came together have one cause and stay together. What one device alone had is left to be what it is: a sign that
    /// others may have something that none had.
    pub fn combinations(&self, times: usize) -> Option<Vec<Vec<Flip>>> {
        let mut events = BTreeMap::<&[usize], Vec<Flip>>::new();
        for (&flip, devices) in self.devices.iter().filter(|(_, devices)| devices.len() > 1) {
            events.entry(devices).or_default().push(flip);
        }
        let mut events: Vec<(&[usize], Vec<Flip>)> = events.into_iter().collect();
        // Stable: equally frequent ones stay in order.
        events.sort_by_key(|(devices, _)| std::cmp::Reverse(devices.len()));
        let (frequent, others) = events.split_at(events.len().min(FREQUENT));
        if (times << frequent.len()) * (1 + others.len()) > MOST {
            return None;
        }
        let combination = |set: usize, other: Option<&(_, Vec<Flip>)>| {
            let chosen = frequent.iter().enumerate().filter(|(bit, _)| set >> bit & 1 == 1).map(|(_, event)| event);
            let mut flips: Vec<Flip> = chosen.chain(other).flat_map(|(_, flips)| flips).copied().collect();
            flips.sort_unstable();
            flips
        };
        let sets = || 0..1usize << frequent.len();
        let others = std::iter::once(None).chain(others.iter().map(Some));
        Some(
            others
                .flat_map(|other| sets().map(move |set| (set, other)))
                .map(|(set, other)| combination(set, other))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_together_stays_together_and_what_came_once_is_left() {
        let flip = |column| Flip { column, bits: 1 };
        let mut seen = Seen::default();
        for (device, flips) in [&[3usize, 5][..], &[1], &[3, 5], &[1, 3, 5], &[9]].into_iter().enumerate() {
            seen.add(device, &flips.iter().map(|&column| flip(column)).collect::<Vec<_>>());
        }
        let combinations = seen.combinations(1).unwrap();
        let columns: Vec<Vec<usize>> =
            combinations.iter().map(|flips| flips.iter().map(|flip| flip.column).collect()).collect();
        assert_eq!(columns, [vec![], vec![3, 5], vec![1], vec![1, 3, 5]]);
        assert!(seen.combinations(32).is_some() && seen.combinations(33).is_none());
    }
}
