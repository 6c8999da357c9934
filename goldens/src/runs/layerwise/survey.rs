//! What of the device was compared with what, and how it compares: cache rows and states of each layer, each from the
//! latest state of the device before it, against sampled devices that start from the same (`docs/bisect.md`, Layer).

use std::collections::BTreeMap;
use std::ops::Range;

use half::bf16;
use ndarray::{Array2, Axis};
use rayon::prelude::*;
use reference::bounds::Confidence;
use reference::model::ModelError;
use reference::rounding::{is_bf16_tie, to_bf16};
use reference::{Freedom, Policy, Rounding};

use super::known::{Known, place_name};
use super::walk::{Layers, Walked, Walker};
use crate::judge::Progress;
use crate::rules::TieTally;
use crate::runs::behind::{Judged, Nominal, judge, measure};
use crate::spread::{Distribution, MOVED, Row, TESTS};

/// Sampled rows of each comparison.
const ROWS: usize = 96;
/// Sampled devices at least.
const DEVICES: usize = 4;

/// What is compared of a layer, in the order in which it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// Key rows.
    K,
    /// Value rows.
    V,
    /// The state after the layer.
    State,
}

/// Rows of one tensor that start from the same layer.
#[derive(Debug)]
pub struct Point {
    /// What it is.
    pub what: What,
    /// The layer that made it.
    pub layer: usize,
    /// The first layer that ran: its input is the device's own state, or an embedding.
    pub start: usize,
    /// The places, one a row.
    pub places: Vec<usize>,
    /// What the device gave.
    pub device: Array2<bf16>,
    /// What the reference gives.
    pub nominal: Array2<bf16>,
    /// How they compare.
    pub judged: Judged,
}

impl Point {
    /// Places that hold drift.
    pub fn drifting(&self) -> impl Iterator<Item = usize> {
        self.judged.rows.iter().map(|&row| self.places[row])
    }
}

/// What a survey looks at.
pub struct Survey<'a, 'w, 'r> {
    /// The reference.
    pub walker: &'a Walker<'w, 'r>,
    /// Places.
    pub places: &'a [usize],
    /// Layers.
    pub layers: Range<usize>,
    /// States that layers start from.
    pub inputs: &'a Known,
    /// States that are judged.
    pub evidence: &'a Known,
    /// How sure bounds are to hold.
    pub confidence: Confidence,
    /// False-alarm probability of the whole run.
    pub false_alarm: f64,
    /// Hears what is done.
    pub progress: &'a dyn Progress,
}

/// Rows of one tensor that are to be compared.
struct Target {
    what: What,
    layer: usize,
    start: usize,
    phase: usize,
    /// All rows with this start; sampled devices move all of them.
    rows: Vec<usize>,
    /// Those of them that the device gave.
    given: Vec<usize>,
}

impl Survey<'_, '_, '_> {
    /// Runs the nominal reference.
    ///
    /// # Errors
    /// The model lacks a layer.
    pub fn nominal(&self, policy: &Policy) -> Result<Layers, ModelError> {
        self.walker.walk(self.places, self.layers.clone(), self.inputs, policy)
    }

    /// How exact ties at `out` went in the states that decode steps gave. Flips before them blur single ones, so that only
    /// a clear majority counts.
    pub fn ties_at_out(&self, nominal: &Layers) -> TieTally {
        let mut tally = TieTally::default();
        for (layer, phases) in self.layers.clone().zip(nominal) {
            let Some((walked, wide)) = phases[1].as_ref().and_then(|w| Some((w, w.ran.wide.as_ref()?))) else {
                continue;
            };
            for (n, &index) in walked.indices.iter().enumerate() {
                let Some(device) = self.evidence.get(layer, index) else { continue };
                for (column, &value) in wide.row(n).iter().enumerate().filter(|(_, value)| is_bf16_tie(**value)) {
                    let (even, away) = (to_bf16(value, Rounding::Rne), to_bf16(value, Rounding::TiesAway));
                    let name = || format!("layer {layer}, {}", place_name(self.walker.one.plan, index));
                    tally.count(&even, &away, &device[column], name);
                }
            }
        }
        tally.clear_majority()
    }

    /// Samples devices and judges everything that the device gave.
    ///
    /// # Errors
    /// The model lacks a layer.
    pub fn judge(&self, nominal: &Layers, policy: &Policy) -> Result<Vec<Point>, ModelError> {
        let targets = self.targets(nominal);
        let values: Vec<(Array2<bf16>, Option<Array2<f32>>)> = targets
            .iter()
            .filter_map(|target| {
                let walked = self.walked(nominal, target)?;
                let addends = (target.what == What::State).then_some(walked.ran.addends.as_ref()).flatten();
                let selected = tensor(walked, target.what).select(Axis(0), &target.rows);
                Some((selected, addends.map(|addends| addends.select(Axis(0), &target.rows))))
            })
            .collect();
        let samples = self.sample(&targets, &values, policy)?;
        let false_alarm = self.false_alarm * TESTS / TESTS.max(targets.len() as f64);
        let mut points = Vec::new();
        for ((target, (values, addends)), samples) in targets.iter().zip(&values).zip(&samples) {
            let Some(walked) = self.walked(nominal, target) else { continue };
            let at: Vec<usize> =
                target.given.iter().filter_map(|row| target.rows.iter().position(|other| other == row)).collect();
            let places: Vec<usize> = target.given.iter().map(|&row| walked.indices[row]).collect();
            let nominal = values.select(Axis(0), &at);
            let addends = addends.as_ref().map(|addends| addends.select(Axis(0), &at));
            let mut device = nominal.clone();
            for (mut row, &index) in device.rows_mut().into_iter().zip(&places) {
                match target.what {
                    What::State => {
                        if let Some(state) = self.evidence.get(target.layer, index) {
                            row.assign(&state);
                        }
                    }
                    What::K | What::V => {
                        if let Some(held) = self.walker.held[usize::from(target.what == What::V)] {
                            row.assign(&held[target.layer].row(index));
                        }
                    }
                }
            }
            let name = |rows: &[usize]| self.names(rows.iter().map(|&row| places[row]));
            let tensor = Nominal::summed(&nominal, addends.as_ref());
            let judged = judge(&device, tensor, samples, self.confidence.lambda(), false_alarm, name);
            let Target { what, layer, start, .. } = *target;
            points.push(Point { what, layer, start, places, device, nominal, judged });
        }
        Ok(points)
    }

    /// Names some places: the first few, and how many more.
    pub fn names(&self, places: impl Iterator<Item = usize>) -> String {
        let all: Vec<String> = places.map(|index| place_name(self.walker.one.plan, index)).collect();
        let more = if all.len() > 3 { format!("; and {} more", all.len() - 3) } else { String::new() };
        format!("{}{more}", all.iter().take(3).cloned().collect::<Vec<_>>().join("; "))
    }

    fn walked<'n>(&self, layers: &'n Layers, target: &Target) -> Option<&'n Walked> {
        layers.get(target.layer - self.layers.start)?[target.phase].as_ref()
    }

    fn targets(&self, nominal: &Layers) -> Vec<Target> {
        let mut targets = Vec::new();
        for (layer, phases) in self.layers.clone().zip(nominal) {
            for (phase, walked) in phases.iter().enumerate().filter_map(|(phase, w)| Some((phase, w.as_ref()?))) {
                let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
                for (row, &start) in walked.starts.iter().enumerate() {
                    groups.entry(start).or_default().push(row);
                }
                for (start, rows) in groups {
                    for what in [What::K, What::V, What::State] {
                        let index = |row: &usize| walked.indices[*row];
                        let given: Vec<usize> = match what {
                            // The first layer's rows follow from the token alone, and are judged strictly elsewhere.
                            What::K | What::V if layer == 0 => Vec::new(),
                            What::K if self.walker.held[0].is_none() => Vec::new(),
                            What::V if self.walker.held[1].is_none() => Vec::new(),
                            // Where histories are made from states, more places run than are looked at.
                            What::K | What::V => {
                                rows.iter().copied().filter(|row| self.places.contains(&index(row))).collect()
                            }
                            What::State => rows
                                .iter()
                                .copied()
                                .filter(|row| self.places.contains(&index(row)))
                                .filter(|row| self.evidence.get(layer, index(row)).is_some())
                                .collect(),
                        };
                        if !given.is_empty() {
                            targets.push(Target { what, layer, start, phase, rows: rows.clone(), given });
                        }
                    }
                }
            }
        }
        targets
    }

    /// What sampled devices do to each target. Where these hardly move anything their freedoms are enlarged, so that a rare
    /// single flip is excused.
    fn sample(
        &self,
        targets: &[Target],
        values: &[(Array2<bf16>, Option<Array2<f32>>)],
        policy: &Policy,
    ) -> Result<Vec<Distribution>, ModelError> {
        let mut spread = vec![Distribution::default(); targets.len()];
        let fewest = targets.iter().map(|target| target.rows.len()).min().unwrap_or(ROWS).max(1);
        let devices = ROWS.div_ceil(fewest).max(DEVICES);
        let units: Vec<Vec<Vec<f64>>> = values
            .iter()
            .map(|(values, addends)| {
                let nominal = Nominal::summed(values, addends.as_ref());
                (0..values.nrows()).map(|row| nominal.units(row)).collect()
            })
            .collect();
        for gain in [1u32, 16, 256, 4096] {
            if spread.iter().all(|distribution| distribution.moved >= MOVED) {
                break;
            }
            let lacking: Vec<bool> = spread.iter().map(|distribution| distribution.moved < MOVED).collect();
            let devices = if gain == 1 { devices } else { devices.div_ceil(4) };
            self.progress.step(&format!("{devices} sampled devices"));
            let sampled: Vec<Vec<Vec<Row>>> = (0..devices as u64)
                .into_par_iter()
                .map(|seed| {
                    let freedom = if gain == 1 { Freedom::Sampled { seed } } else { Freedom::Enlarged { seed, gain } };
                    let layers = self.nominal(&policy.clone().under(freedom))?;
                    let each = targets.iter().zip(values).zip(&units);
                    let of = each.map(|((target, (values, _)), units)| {
                        let Some(walked) = self.walked(&layers, target) else { return Vec::new() };
                        let sampled = tensor(walked, target.what);
                        let rows = target.rows.iter().enumerate();
                        rows.map(|(n, &row)| measure(sampled.row(row), values.row(n), &units[n])).collect()
                    });
                    Ok(of.collect())
                })
                .collect::<Result<_, ModelError>>()?;
            // In the order of their seeds, whatever ran first.
            for device in &sampled {
                for ((distribution, rows), _) in
                    spread.iter_mut().zip(device).zip(&lacking).filter(|(_, lacking)| **lacking)
                {
                    distribution.add(rows.iter());
                }
            }
        }
        spread.iter_mut().for_each(Distribution::finish);
        Ok(spread)
    }
}

fn tensor(walked: &Walked, what: What) -> &Array2<bf16> {
    match what {
        What::K => &walked.ran.k,
        What::V => &walked.ran.v,
        What::State => &walked.ran.out,
    }
}
