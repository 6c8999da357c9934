//! Sampled devices behind a gap: the reference run forward with permitted freedoms, and how far that moves each row from
//! the nearest of the places at which right devices lie.

use std::sync::Arc;

use rayon::prelude::*;
use reference::stages::{STAGES, stage_of};
use reference::{BATCH, Freedom, LayerInputs, Policy, Rounding, Site, Tensor, TensorId, Trace};

use super::flips::{Flip, Flips, QUANTIZED, Seen, flipped, flips};
use super::scale::Scale;
use super::{needed_stages, renarrowed, replay};
use crate::compare::Session;
use crate::judge::Progress;
use crate::place::counted;
use crate::spread::{Distribution, MOVED, Row};

/// Sampled devices with a fault, in whose place the one device that is judged may be.
const FAULTY_SAMPLES: u64 = 16;

/// By how much elementary functions are made worse to find flips that right devices take seldom.
const REACH: u32 = 16;

/// Sampled devices: as many as a small model makes cheap, at least sixteen.
fn samples(inputs: &LayerInputs<'_>) -> u64 {
    let geometry = inputs.geometry;
    let weights = geometry.hidden_size * (2 * geometry.q_width() + 3 * geometry.intermediate_size);
    if weights < 1 << 26 { 64 } else { 16 }
}

/// What lies between the known tensors and the one that is judged.
pub struct Gap<'a, 's, 'd> {
    pub session: &'a Session<'s, 'd>,
    pub id: TensorId,
    /// The cast whose rule was settled by the tensor itself.
    pub site: Option<Site>,
    pub policy: &'a Policy,
    pub known: &'a Trace,
    pub needed: &'a [usize],
    pub nominal: &'a Trace,
}

/// What sampled devices showed.
#[derive(Clone, Debug, Default)]
pub struct Sampled {
    /// How far their rows are from the nearest centre.
    pub distribution: Distribution,
    /// The nominal run first, then it with flips that permitted freedoms reach.
    centres: Vec<Centre>,
}

/// A run without freedoms.
#[derive(Clone, Debug)]
struct Centre {
    /// The flips of each row.
    flips: Vec<Flips>,
    tensor: Arc<Tensor>,
}

impl Sampled {
    /// A row's distance from the nearest centre, and that centre's index.
    fn nearest(&self, scale: &Scale, device: &Tensor, row: usize) -> (Row, usize) {
        let measure = |centre: &Centre| scale.measure_row(row, device, &centre.tensor, |_, _| true);
        let mut nearest = (self.centres.first().map(measure).unwrap_or_default(), 0);
        for (index, centre) in self.centres.iter().enumerate().skip(1) {
            if centre.flips[row] != Flips::default() {
                let measured = measure(centre);
                // What is infinitely far from all stays with the nominal run.
                if measured.energy < nearest.0.energy {
                    nearest = (measured, index);
                }
            }
        }
        nearest
    }

    /// The flips of the centre that each row is nearest to; none where that is the nominal run for all.
    pub fn nearest_flips(&self, scale: &Scale, device: &Tensor) -> Option<Vec<Flips>> {
        let nearest: Vec<usize> = (0..BATCH).map(|row| self.nearest(scale, device, row).1).collect();
        let chosen = nearest.iter().enumerate().map(|(row, &index)| self.centres[index].flips[row].clone());
        nearest.iter().any(|&index| index > 0).then(|| chosen.collect())
    }
}

/// A sampled device: the target, and what tells where it lies.
type Device = Trace;

/// Places at which a row's right devices lie; none where nothing that is quantized lies behind the gap, or where there are too
/// many to tell them apart.
type Places = Option<Vec<Flips>>;

impl Gap<'_, '_, '_> {
    /// What permitted freedoms do to the tensor. Where sampled devices hardly move, a rare single flip must be excused
    /// all the same: freedoms are enlarged until enough of the rows that tell something show what flips do.
    pub fn sample(&self, scale: &Scale, rows: &[usize], progress: &dyn Progress) -> Sampled {
        let most = if self.session.deviations.is_empty() { samples(self.session.inputs) } else { FAULTY_SAMPLES };
        let few = most / 4;
        let right = self.devices(1, most, progress);
        let mut places = self.places(&right);
        // Those with enlarged freedoms show rarer flips, and whether there are some that no other device has.
        let wide =
            if places.iter().any(Option::is_some) { self.devices(REACH, most / 2, progress) } else { Vec::new() };
        if !wide.is_empty() {
            places = self.places(&right.iter().chain(&wide).cloned().collect::<Vec<_>>());
        }

        let mut sampled = Sampled { distribution: Distribution::default(), centres: self.centres(&places) };
        let add = |sampled: &mut Sampled, devices: &[Device], rows: &[usize]| {
            let nearest = |device: &Device| {
                let tensor = device.get(self.id)?;
                Some(rows.iter().map(|&row| sampled.nearest(scale, tensor, row).0).collect::<Vec<_>>())
            };
            let nearest: Vec<_> = devices.par_iter().filter_map(nearest).collect();
            nearest.iter().for_each(|nearest| sampled.distribution.add(nearest.iter()));
        };
        let told: Vec<usize> = rows.iter().copied().filter(|&row| places[row].is_some()).collect();
        add(&mut sampled, &right, rows);
        add(&mut sampled, &wide, &told);
        // Of rows that lie at places, flips that are not within reach of the wide devices are not within a right one's.
        for gain in [16, 256, 4096] {
            if sampled.distribution.moved >= MOVED || !told.is_empty() {
                break;
            }
            add(&mut sampled, &self.devices(gain, few, progress), rows);
        }
        match scale.narrowed {
            true => sampled.distribution.finish(),
            false => sampled.distribution.finish_whole(),
        }
        sampled
    }

    /// Sampled devices. Whole ones at a time: much of one is sequential. They come in the order of their seeds.
    fn devices(&self, gain: u32, samples: u64, progress: &dyn Progress) -> Vec<Device> {
        let device = |seed: u64| {
            progress.step(&format!("{} against sampled device {} of {samples}", self.id.name(), seed + 1));
            let freedom = if gain == 1 { Freedom::Sampled { seed } } else { Freedom::Enlarged { seed, gain } };
            let policy = self.policy.clone().under(freedom);
            let trace = replay(&self.session.context(&policy), self.known, self.needed, Some(self.nominal));
            let mut kept = Trace::new();
            let quantized = QUANTIZED.into_iter().flat_map(|(values, codes)| [values, codes]);
            quantized.chain([self.id]).for_each(|id| kept.take(id, &trace));
            kept
        };
        (0..samples).into_par_iter().map(device).collect()
    }

    /// Where the rows of right devices lie: at each combination of the flips that these devices showed.
    fn places(&self, devices: &[Device]) -> Vec<Places> {
        let behind = self.behind();
        let mut places: Vec<Places> = vec![behind.contains(&true).then(|| vec![Flips::default()]); BATCH];
        for place in (0..QUANTIZED.len()).filter(|&place| behind[place]) {
            // Flips are told against the run that has the earlier ones.
            let bases = self.runs(&places);
            let mut seen = vec![Seen::default(); BATCH];
            for (index, device) in devices.iter().enumerate() {
                for row in 0..BATCH {
                    let earlier: Vec<_> = (0..place).map(|place| flips(&bases[0], device, place, row)).collect();
                    let same = |flips: &Flips| flips.starts_with(&earlier);
                    let base = places[row].as_ref().and_then(|places| places.iter().position(same));
                    if let Some(base) = base {
                        seen[row].add(index, &flips(&bases[base], device, place, row));
                    }
                }
            }
            for (places, seen) in places.iter_mut().zip(&seen) {
                let with = |old: &Vec<Flips>, combinations: Vec<Vec<Flip>>| {
                    let with = |flips: &Flips, more: &Vec<Flip>| {
                        let mut flips = flips.clone();
                        flips[place].clone_from(more);
                        flips
                    };
                    combinations.iter().flat_map(|more| old.iter().map(move |flips| with(flips, more))).collect()
                };
                *places = places.take().and_then(|old| Some(with(&old, seen.combinations(old.len())?)));
            }
        }
        places
    }

    /// The runs without freedom in which the `k`-th place of each row is taken; the nominal run first.
    fn runs(&self, places: &[Places]) -> Vec<Trace> {
        spread_out(places).par_iter().map(|flips| self.run(flips)).collect()
    }

    fn centres(&self, places: &[Places]) -> Vec<Centre> {
        let centre = |flips: Vec<Flips>| {
            let tensor = Arc::new(renarrowed(&self.run(&flips), self.id, self.site, self.policy));
            Centre { flips, tensor }
        };
        spread_out(places).into_par_iter().map(centre).collect()
    }

    /// The nominal run with these flips.
    pub fn run(&self, rows: &[Flips]) -> Trace {
        let (mut known, mut trace) = (self.known.clone(), self.nominal.clone());
        for (place, (values, _)) in QUANTIZED.into_iter().enumerate() {
            let Some(tensor) = trace.get(values).and_then(|tensor| flipped(tensor, place, rows)) else { continue };
            known.force(values, Arc::new(tensor));
            let needed = needed_stages(self.id, &known, self.session.deviations);
            trace = replay(&self.session.context(self.policy), &known, &needed, Some(&trace));
        }
        trace
    }

    /// Says which rows are compared with a run that has flips.
    pub fn note(&self, rows: &[Flips]) -> String {
        let names = |flips: &Flips| {
            let names =
                QUANTIZED.iter().zip(flips).filter(|(_, flips)| !flips.is_empty()).map(|((values, _), _)| *values);
            names.collect::<Vec<_>>()
        };
        let changed: Vec<usize> = (0..BATCH).filter(|&row| !names(&rows[row]).is_empty()).collect();
        let named: std::collections::BTreeSet<TensorId> = rows.iter().flat_map(names).collect();
        format!(
            "{}: compared with the reference after a rounding flip of {} that permitted freedoms reach",
            counted("row", &changed),
            named.into_iter().map(TensorId::name).collect::<Vec<_>>().join(" and "),
        )
    }

    /// Which of [`QUANTIZED`] lie behind the gap, and are quantized as narrowed. Kernels with faults are taken as a whole.
    fn behind(&self) -> [bool; QUANTIZED.len()] {
        let written = |id| self.needed.iter().any(|&stage| STAGES[stage].writes.contains(&id)) && !self.known.holds(id);
        let narrowed = |id| stage_of(id).sites.last().is_some_and(|&site| self.policy.at(site) != Rounding::None);
        let right = self.session.deviations.is_empty();
        QUANTIZED
            .map(|(values, codes)| right && values != self.id && written(values) && written(codes) && narrowed(values))
    }
}

/// For each `k` the `k`-th place of every row, and the first, nominal one in rows with fewer.
fn spread_out(places: &[Places]) -> Vec<Vec<Flips>> {
    let most = places.iter().flatten().map(Vec::len).max().unwrap_or(1);
    let of = |k: usize| {
        let of_row = |places: &Places| places.as_ref().and_then(|places| places.get(k)).cloned().unwrap_or_default();
        places.iter().map(of_row).collect()
    };
    (0..most).map(of).collect()
}
