//! From marks to the report on one tensor of a token run.

use std::collections::BTreeSet;

use half::bf16;
use reference::DType;

use crate::Mark;
use crate::maps::{Grid, TensorMap};
use crate::report::{Element, Number, TensorReport, Verdict};
use crate::tally::ulps;

/// Elements listed as the worst.
const WORST: usize = 5;

/// What was found in one tensor.
#[derive(Debug)]
pub struct Findings {
    report: TensorReport,
    rows: BTreeSet<usize>,
    heads: BTreeSet<usize>,
    pages: BTreeSet<usize>,
    /// Elements of each mark, the worst first; drift, ties and flips.
    worst: [Vec<(f64, Element)>; 3],
    /// Where its marks lie, when that was asked for.
    map: Option<TensorMap>,
}

/// One element of both sides.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    device: f64,
    reference: f64,
    of: Of,
}

/// What the two sides are.
#[derive(Clone, Copy, Debug)]
enum Of {
    /// Numbers of a floating-point type, and their bits.
    Numbers(DType, [u32; 2]),
    /// Ids: they name something, so that there is no distance between two of them.
    Ids(i64, Option<usize>),
}

impl From<[bf16; 2]> for Pair {
    fn from([device, reference]: [bf16; 2]) -> Self {
        let bits = [device, reference].map(|value| u32::from(value.to_bits()));
        Self { device: device.to_f64(), reference: reference.to_f64(), of: Of::Numbers(DType::Bf16, bits) }
    }
}

impl From<[f32; 2]> for Pair {
    fn from([device, reference]: [f32; 2]) -> Self {
        let of = Of::Numbers(DType::F32, [device.to_bits(), reference.to_bits()]);
        Self { device: f64::from(device), reference: f64::from(reference), of }
    }
}

impl Pair {
    /// Two ids; the reference's may be none.
    pub fn ids(device: i64, reference: Option<usize>) -> Self {
        let known = reference.map_or(f64::NAN, |id| id as f64);
        Self { device: device as f64, reference: known, of: Of::Ids(device, reference) }
    }

    /// Whether both sides hold the same bits; NaN equals NaN.
    pub fn same(&self) -> bool {
        match self.of {
            Of::Numbers(_, [device, reference]) => {
                device == reference || (self.device.is_nan() && self.reference.is_nan())
            }
            Of::Ids(device, reference) => usize::try_from(device).ok() == reference && reference.is_some(),
        }
    }

    /// Units in the last place between them; the same bits are none apart, whatever they stand for.
    fn distance(&self) -> Option<u64> {
        let Of::Numbers(dtype, [device, reference]) = self.of else { return None };
        let finite = self.device.is_finite() && self.reference.is_finite();
        (finite || device == reference).then(|| ulps(dtype, device, reference))
    }

    fn difference(&self) -> f64 {
        let difference = (self.device - self.reference).abs();
        if difference.is_finite() { difference } else { f64::INFINITY }
    }

    fn exactly_half(&self) -> bool {
        matches!(self.of, Of::Numbers(..)) && self.reference != 0.0 && self.device * 2.0 == self.reference
    }

    fn element(&self, index: Vec<usize>) -> Element {
        let (bits, ulps) = match self.of {
            Of::Numbers(dtype, bits) => {
                let width = dtype.size() * 2;
                let finite = self.device.is_finite() && self.reference.is_finite();
                (bits.map(|bits| format!("0x{bits:0width$x}")), finite.then(|| ulps(dtype, bits[0], bits[1])))
            }
            Of::Ids(device, reference) => {
                let reference = reference.map_or_else(|| "absent".to_owned(), |id| format!("0x{id:016x}"));
                ([format!("0x{device:016x}"), reference], None)
            }
        };
        let [device_bits, reference_bits] = bits;
        let (device, reference) = (Number(self.device), Number(self.reference));
        Element { index, device, reference, device_bits, reference_bits, ulps }
    }
}

impl Findings {
    /// Nothing found yet.
    pub fn new(name: &str, forced: bool) -> Self {
        let report = TensorReport { forced, ..TensorReport::new(name, Verdict::Pass) };
        Self {
            report,
            rows: BTreeSet::new(),
            heads: BTreeSet::new(),
            pages: BTreeSet::new(),
            worst: Default::default(),
            map: None,
        }
    }

    /// Tells where its marks lie as well, over these axes; elements come with their places through [`Self::place`].
    pub fn mapped(self, grids: Option<Vec<Grid>>) -> Self {
        Self { map: grids.map(|grids| TensorMap { grids, ..TensorMap::default() }), ..self }
    }

    /// Says where an element lies in each of the maps.
    pub fn place(&mut self, mark: Mark, places: &[[usize; 2]]) {
        let grids = self.map.iter_mut().flat_map(|map| &mut map.grids);
        grids.zip(places).for_each(|(grid, &[down, across])| grid.add(down, across, mark));
    }

    /// Counts one element of batch row `row`.
    pub fn add(&mut self, mark: Mark, pair: Pair, row: usize, index: impl FnOnce() -> Vec<usize>) {
        let report = &mut self.report;
        report.elements += 1;
        report.nonfinite += u64::from(!pair.device.is_finite());
        if let Some(map) = &mut self.map {
            map.distances.add(mark, pair.distance());
        }
        let kind = match mark {
            Mark::Skipped => {
                report.elements -= 1;
                return;
            }
            Mark::Exact => {
                report.exact += 1;
                return;
            }
            Mark::Drift => {
                report.unexplained += 1;
                report.exactly_half += u64::from(pair.exactly_half());
                self.rows.insert(row);
                0
            }
            Mark::Tie => {
                report.explained_ties += 1;
                1
            }
            Mark::Flip => {
                report.explained_flips += 1;
                2
            }
        };
        let (worst, difference) = (&mut self.worst[kind], pair.difference());
        let full = worst.len() >= WORST;
        if !full || worst.last().is_some_and(|(least, _)| difference > *least) {
            worst.truncate(WORST - usize::from(full));
            let at = worst.partition_point(|(larger, _)| *larger >= difference);
            worst.insert(at, (difference, pair.element(index())));
        }
    }

    /// Says where drift lies besides its row.
    pub fn drifts_at(&mut self, head: Option<usize>, page: Option<usize>) {
        self.heads.extend(head);
        self.pages.extend(page);
    }

    /// Adds a remark.
    pub fn note(&mut self, note: String) {
        self.report.notes.push(note);
    }

    /// A failure that no single element shows.
    pub fn fail(&mut self) {
        self.report.verdict = Verdict::Fail;
    }

    /// The report.
    pub fn finish(mut self) -> TensorReport {
        let report = &mut self.report;
        report.explained = report.explained_flips + report.explained_ties;
        if report.unexplained > 0 {
            report.verdict = Verdict::Fail;
        } else if report.elements == 0 && report.verdict == Verdict::Pass {
            report.verdict = Verdict::Unjudged;
        }
        let drifts = !self.worst[0].is_empty();
        let worst = self.worst.into_iter().find(|worst| !worst.is_empty()).unwrap_or_default();
        let worst: Vec<Element> = worst.into_iter().map(|(_, element)| element).collect();
        report.worst = worst.first().cloned();
        report.worst_elements = if drifts { worst } else { Vec::new() };
        report.rows_failing = self.rows.into_iter().collect();
        report.heads_failing = self.heads.into_iter().collect();
        report.pages_failing = self.pages.into_iter().collect();
        report.map = self.map.map(Box::new);
        self.report
    }
}
