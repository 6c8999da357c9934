//! States behind the first layer: what permitted freedoms do to them is sampled inside the reference, on the device's own
//! history, and the device is judged against that distribution (`docs/verdicts.md`, Token runs).

use half::bf16;
use ndarray::{Array2, ArrayView1};
use rayon::prelude::*;
use reference::model::{ModelError, Weights};
use reference::{BATCH, Freedom, Policy};

use super::forced::{Forced, States};
use crate::Mark;
use crate::compare::same_bf16;
use crate::judge::Progress;
use crate::spread::{Distribution, MOVED, Row, TESTS};

/// Sampled rows of each tensor and layer.
const ROWS: usize = 96;

/// What sampled devices do to every tensor behind the first layer.
#[derive(Debug, Default)]
pub struct Spread {
    /// K by layer; the first layer's is empty.
    pub k: Vec<Distribution>,
    /// V by layer.
    pub v: Vec<Distribution>,
    /// The last layer's output.
    pub hidden: Distribution,
    /// The last layer's outputs themselves, where asked for: the nominal row that the first of each belongs to, and rows.
    pub states: Vec<(usize, Array2<bf16>)>,
}

impl Spread {
    /// Samples devices on the places `indices`, whose nominal states are `nominal`. Every 16 places have devices of their
    /// own. Where these hardly move anything their freedoms are enlarged, so that a rare single flip is excused. With
    /// `keep_states` the last states of those that go no further than is permitted are kept.
    ///
    /// # Errors
    /// As [`Forced::run`].
    pub fn sample<W: Weights + Sync>(
        forced: &Forced<'_, W>,
        indices: &[usize],
        nominal: &States,
        policy: &Policy,
        keep_states: bool,
        progress: &dyn Progress,
    ) -> Result<Self, ModelError> {
        let layers = nominal.k.len();
        let mut spread = Self {
            k: vec![Distribution::default(); layers],
            v: vec![Distribution::default(); layers],
            hidden: Distribution::default(),
            states: Vec::new(),
        };
        let chunks: Vec<&[usize]> = indices.chunks(BATCH).collect();
        for gain in [1u32, 16, 256, 4096] {
            if spread.moved() >= MOVED || indices.is_empty() {
                break;
            }
            let rounds = if gain == 1 { ROWS.div_ceil(indices.len()) } else { ROWS.div_ceil(4 * indices.len()) };
            let devices: Vec<(usize, usize)> =
                (0..rounds).flat_map(|round| (0..chunks.len()).map(move |chunk| (round, chunk))).collect();
            progress.step(&format!("{} sampled devices", devices.len()));
            let sampled: Vec<_> = devices
                .par_iter()
                .map(|&(round, chunk)| {
                    let seed = (round * chunks.len() + chunk) as u64;
                    let freedom = if gain == 1 { Freedom::Sampled { seed } } else { Freedom::Enlarged { seed, gain } };
                    let states = forced.run(chunks[chunk], &policy.clone().under(freedom))?;
                    Ok((chunk * BATCH, Energies::new(&states, nominal, chunk * BATCH), states.hidden))
                })
                .collect::<Result<Vec<_>, ModelError>>()?;
            // In the order of their seeds, whatever ran first.
            for (first, energies, hidden) in sampled {
                if keep_states && gain == 1 {
                    spread.states.push((first, hidden));
                }
                for (all, rows) in spread.k.iter_mut().zip(&energies.k).chain(spread.v.iter_mut().zip(&energies.v)) {
                    all.add(rows.iter());
                }
                spread.hidden.add(energies.hidden.iter());
            }
        }
        spread.k.iter_mut().chain(&mut spread.v).for_each(Distribution::finish);
        spread.hidden.finish();
        Ok(spread)
    }

    /// The fewest rows that moved in any tensor behind the first layer.
    fn moved(&self) -> usize {
        let behind = self.k.iter().skip(1).chain(self.v.iter().skip(1)).chain([&self.hidden]);
        behind.map(|distribution| distribution.moved).min().unwrap_or(0)
    }
}

/// How a sampled device's rows differ from the nominal ones.
struct Energies {
    k: Vec<Vec<Row>>,
    v: Vec<Vec<Row>>,
    hidden: Vec<Row>,
}

impl Energies {
    /// `states` begins at row `first` of `nominal`.
    fn new(states: &States, nominal: &States, first: usize) -> Self {
        let rows = |sampled: &Array2<bf16>, nominal: Nominal<'_>| -> Vec<Row> {
            let rows = sampled.rows().into_iter().enumerate();
            rows.map(|(row, sampled)| measure(sampled, nominal.values.row(first + row), &nominal.units(first + row)))
                .collect()
        };
        let layers = |sampled: &[Array2<bf16>], nominal: &[Array2<bf16>]| {
            sampled
                .iter()
                .zip(nominal)
                .map(|(sampled, nominal)| rows(sampled, Nominal::narrowed_once(nominal)))
                .collect()
        };
        Self {
            k: layers(&states.k, &nominal.k),
            v: layers(&states.v, &nominal.v),
            hidden: rows(&states.hidden, Nominal::last(nominal)),
        }
    }
}

/// A tensor of the nominal run.
#[derive(Clone, Copy)]
pub struct Nominal<'a> {
    /// Its values.
    values: &'a Array2<bf16>,
    /// Magnitudes of narrowed values that each is the sum of.
    addends: Option<&'a Array2<f32>>,
}

impl<'a> Nominal<'a> {
    /// A tensor narrowed once, from FP32.
    pub fn narrowed_once(values: &'a Array2<bf16>) -> Self {
        Self { values, addends: None }
    }

    /// The last layer's output.
    pub fn last(states: &'a States) -> Self {
        Self::summed(&states.hidden, states.addends.as_ref())
    }

    /// A layer's output, with the magnitudes of the narrowed values that it is the sum of, where it is.
    pub fn summed(values: &'a Array2<bf16>, addends: Option<&'a Array2<f32>>) -> Self {
        Self { values, addends }
    }

    /// Units in which the elements of a row are measured: the BF16 spacing at an element's size, at the size of its row
    /// where the element is small, or of what it is the sum of.
    pub fn units(&self, row: usize) -> Vec<f64> {
        let spacing = |x: f64| if x > 0.0 && x.is_finite() { 2f64.powi(x.log2().floor() as i32 - 7) } else { 1.0 };
        let values = self.values.row(row);
        let squares: f64 = values.iter().map(|x| x.to_f64().powi(2)).sum();
        let typical = (squares / values.len().max(1) as f64).sqrt();
        let addend = |column: usize| self.addends.map_or(0.0, |addends| f64::from(addends[(row, column)]));
        let size = |(column, x): (usize, &bf16)| x.to_f64().abs().max(typical).max(addend(column));
        values.iter().enumerate().map(size).map(spacing).collect()
    }

    /// Steps by which an element may differ that hardly moved: one at each narrowing near whose boundary it lies.
    fn steps(&self) -> f64 {
        if self.addends.is_some() { 3.0 } else { 1.0 }
    }
}

/// Distance of two values in units; infinite when one is not finite.
fn distance(a: bf16, b: bf16, unit: f64) -> f64 {
    let difference = (a.to_f64() - b.to_f64()).abs();
    if difference.is_nan() { f64::INFINITY } else { difference / unit }
}

/// How a row differs from the nominal one, in units of `units`.
pub fn measure(row: ArrayView1<'_, bf16>, nominal: ArrayView1<'_, bf16>, units: &[f64]) -> Row {
    let mut measured = Row { elements: row.len(), ..Row::default() };
    for ((&a, &b), &unit) in row.iter().zip(&nominal).zip(units) {
        if !same_bf16(a, b) {
            measured.differing += 1;
            measured.energy += distance(a, b, unit).powi(2);
            measured.lean += if (a > b) == (b > bf16::ZERO) { 1.0 } else { -1.0 };
        }
    }
    measured.energy /= measured.elements.max(1) as f64;
    measured.lean /= measured.differing.max(1) as f64;
    measured
}

/// One tensor of one layer, judged.
#[derive(Debug)]
pub struct Judged {
    /// The mark of each element, `[n, width]`.
    pub marks: Array2<Mark>,
    /// Mean square difference of all rows, in units.
    pub energy: f64,
    /// What is wrong, in words.
    pub notes: Vec<String>,
    /// Rows that hold drift.
    pub rows: Vec<usize>,
}

/// Judges the rows of a tensor against sampled ones, at the run's false-alarm probability. `name` names some of them.
pub fn judge(
    device: &Array2<bf16>,
    nominal: Nominal<'_>,
    samples: &Distribution,
    lambda: f64,
    false_alarm: f64,
    name: impl Fn(&[usize]) -> String,
) -> Judged {
    let units: Vec<Vec<f64>> = (0..device.nrows()).map(|row| nominal.units(row)).collect();
    let rows: Vec<Row> =
        (0..device.nrows()).map(|row| measure(device.row(row), nominal.values.row(row), &units[row])).collect();
    let energies: Vec<f64> = rows.iter().map(|row| row.energy).collect();
    // Eight elements by one step never count.
    let floor = 8.0 / device.ncols().max(1) as f64;
    let (mut far, how_far) = samples.too_far(&energies, |_| floor, false_alarm / TESTS);
    far.sort_unstable();
    let leans = |row: &Row| row.lean.abs() > samples.lean.max(0.5) + lambda / (row.differing.max(1) as f64).sqrt();
    let leaning: Vec<usize> = (0..rows.len()).filter(|&row| leans(&rows[row])).collect();
    let mut alone = Vec::new();
    let mut marks = Array2::from_elem(device.dim(), Mark::Exact);
    for (row, measured) in rows.iter().enumerate() {
        let whole = far.binary_search(&row).is_ok() || leaning.contains(&row);
        for (column, mark) in marks.row_mut(row).iter_mut().enumerate() {
            let (a, b) = (device[(row, column)], nominal.values[(row, column)]);
            if same_bf16(a, b) {
                continue;
            }
            let distance = distance(a, b, units[row][column]);
            let lone = distance - nominal.steps() > 2.0 * lambda * measured.deviation_without(distance, true);
            *mark = if whole || lone { Mark::Drift } else { Mark::Flip };
            if lone && !whole && alone.last() != Some(&row) {
                alone.push(row);
            }
        }
    }
    let mut notes = Vec::new();
    if !far.is_empty() {
        notes.push(format!(
            "further from the reference than permitted freedoms reach ({how_far}, against {} sampled rows): {}",
            samples.energies.len(),
            name(&far)
        ));
    }
    if !leaning.is_empty() {
        let how = "nearly every difference goes the same way, as no permitted freedom moves them";
        notes.push(format!("{how}: {}", name(&leaning)));
    }
    if !alone.is_empty() {
        notes.push(format!("single elements far off in rows that are not: {}", name(&alone)));
    }
    let mut failing: Vec<usize> = far.into_iter().chain(leaning).chain(alone).collect();
    failing.sort_unstable();
    failing.dedup();
    let energy = energies.iter().sum::<f64>() / energies.len().max(1) as f64;
    Judged { marks, energy, notes, rows: failing }
}
