//! Which tensor of the contract each entry of a dump is. A name says it, or a map of the user's; without either the
//! content does: an entry is a tensor when it lies nearer to the reference's than half of the way from there to any
//! other candidate of its type and shape, and to zero. No other tensor can be as near then, whatever is wrong with the
//! device. Where two candidates hold the same, or a name and the content contradict each other, the dump is refused.

use std::collections::BTreeMap;

use cases::{Case, Inputs};
use device::dump::{Array, Dump, Role, Stage};
use reference::Products;
use serde::Serialize;

use super::content::{Said, first_difference, joined, said};
use super::distance::Distance;
use super::error::ExchangeError;
use super::targets::{self, IGNORE, Kind, Target};
use crate::mutant::mutant;
use crate::rules::Rules;

/// Entries that are told of in an error.
const FEW: usize = 6;

/// What an entry was taken as.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "taken", content = "tensor")]
pub enum Taken {
    /// An output, which is judged.
    Output(String),
    /// An input, equal to the case's.
    Input(String),
    /// Nothing.
    Nothing,
}

/// A tensor that an entry may be, and how near it is.
#[derive(Clone, Debug, Serialize)]
pub struct Candidate {
    /// The tensor.
    pub tensor: String,
    /// How the entry compares with what the reference has for it.
    #[serde(flatten)]
    pub distance: Distance,
    /// The distance as a share of the tensor's own length.
    pub relative: f64,
}

/// An entry and what became of it.
#[derive(Clone, Debug, Serialize)]
pub struct IdentifiedEntry {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What it was taken as.
    #[serde(flatten)]
    pub taken: Taken,
    /// Why, in words: `by its name`.
    pub why: String,
    /// The two nearest tensors of its type and shape.
    pub candidates: Vec<Candidate>,
}

/// A whole dump.
#[derive(Clone, Debug, Serialize)]
pub struct Identified {
    /// Every entry, in the dump's order, those without usable data at the end.
    pub entries: Vec<IdentifiedEntry>,
    /// Outputs by name. `k_cache` and `v_cache` are whole caches after the run.
    #[serde(skip)]
    pub outputs: BTreeMap<String, Found>,
    /// What else is to be known.
    pub remarks: Vec<String>,
}

/// Where an output was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its place in the dump's arrays.
    pub index: usize,
    /// The contract's shape of it; the entry's may have dimensions of one element more or less.
    pub shape: Vec<usize>,
}

/// What is known of when an entry was taken.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moment {
    Unknown,
    /// Before the run.
    Before,
    /// Before the task that writes it had run: what it holds is nothing.
    Unwritten,
    /// After it was written.
    After,
}

/// Says what each entry of a dump is. `map` gives names of entries their tensors.
///
/// # Errors
/// The case is no decode layer; an entry contradicts its name, the case's inputs or another entry; the content does
/// not tell entries apart; or there is no output among them.
pub fn identify(
    case: &Case,
    inputs: &Inputs,
    dump: &Dump,
    map: &BTreeMap<String, String>,
) -> Result<Identified, ExchangeError> {
    let layer = inputs.layer(0).map_err(|error| ExchangeError::Case(format!("{}: {error}", case.path.display())))?;
    let right = mutant(&layer, &Rules::new(&case.policy).policy, &Products::new(), &[]);
    let targets = targets::targets(case, inputs, &right);
    let search = Search { targets: &targets, dump, map };
    search.check_map()?;
    search.run()
}

struct Search<'a> {
    targets: &'a [Target],
    dump: &'a Dump,
    map: &'a BTreeMap<String, String>,
}

/// An entry that was taken as an output.
struct Output<'a> {
    entry: &'a str,
    array: &'a Array,
    index: usize,
}

impl<'a> Search<'a> {
    fn check_map(&self) -> Result<(), ExchangeError> {
        for (entry, tensor) in self.map {
            let arrays = self.dump.arrays.iter().map(|array| &array.name);
            let mut entries = arrays.chain(self.dump.unusable.iter().map(|unusable| &unusable.name));
            if !entries.any(|name| name == entry) {
                let names: Vec<&str> = self.dump.arrays.iter().map(|array| array.name.as_str()).take(50).collect();
                return Err(ExchangeError::UnknownEntry { entry: entry.clone(), known: names.join(", ") });
            }
            let known = tensor == IGNORE || targets::written(tensor).is_some_and(|(name, ..)| name == tensor);
            if !known && !self.targets.iter().any(|target| target.name == *tensor) {
                let (entry, tensor) = (entry.clone(), tensor.clone());
                return Err(ExchangeError::UnknownTensor { entry, tensor, known: targets::names(self.targets) });
            }
        }
        Ok(())
    }

    fn run(&self) -> Result<Identified, ExchangeError> {
        let mut entries = Vec::new();
        let mut outputs: BTreeMap<&str, Vec<Output<'_>>> = BTreeMap::new();
        let mut alike: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut written: BTreeMap<&str, (&str, Found)> = BTreeMap::new();
        let mut undated = Vec::new();
        for (index, named) in self.dump.arrays.iter().enumerate() {
            let (name, array) = (&named.name, &named.array);
            if let Some(tensor) = self.written(name, array)? {
                let found = Found { index, shape: array.shape.clone() };
                if let Some((first, _)) = written.insert(tensor, (name, found)) {
                    let (first, second) = (first.to_owned(), name.clone());
                    return Err(ExchangeError::Twice { first, second, tensor: tensor.to_owned() });
                }
                entries.push(IdentifiedEntry {
                    name: name.clone(),
                    dtype: array.dtype.to_string(),
                    shape: array.shape.clone(),
                    taken: Taken::Output(tensor.to_owned()),
                    why: if self.map.contains_key(name) { "by the map" } else { "by its name" }.to_owned(),
                    candidates: Vec::new(),
                });
                continue;
            }
            let candidates = self.candidates(array);
            let (target, why) = match self.given(name) {
                Some((None, why)) => (None, why),
                Some((Some(target), why)) => {
                    self.check(name, array, target, &candidates)?;
                    (Some(target), why)
                }
                None => match said(&candidates) {
                    Said::Is(target) => (Some(target), "by its content"),
                    Said::OneOf(same) => {
                        alike.entry(joined(&same, " and ")).or_default().push(format!("`{name}`"));
                        (None, "")
                    }
                    Said::Nothing if candidates.is_empty() => (None, "no tensor of this case has its type and shape"),
                    Said::Nothing => (None, "its content is near no tensor of its type and shape"),
                },
            };
            let (taken, why) = match target {
                Some(target) => self.take(name, array, target, why)?,
                None => (Taken::Nothing, why.to_owned()),
            };
            if let (Taken::Input(tensor), Some(Kind::Cache)) = (&taken, target.map(|target| target.kind))
                && self.moment(name) == Moment::Unknown
            {
                undated.push((name, tensor.clone()));
            }
            if let Taken::Output(_) = taken
                && let Some(target) = target
            {
                outputs.entry(&target.name).or_default().push(Output { entry: name, array, index });
            }
            entries.push(IdentifiedEntry {
                name: name.clone(),
                dtype: array.dtype.to_string(),
                shape: array.shape.clone(),
                taken,
                why,
                candidates: candidates.iter().take(2).map(Candidate::from).collect(),
            });
        }
        refuse_alike(&alike)?;
        for unusable in &self.dump.unusable {
            if let Some((Some(target), _)) = self.given(&unusable.name) {
                let (entry, tensor, reason) = (&unusable.name, &target.name, &unusable.reason);
                let (entry, tensor, reason) = (entry.clone(), tensor.clone(), reason.clone());
                return Err(ExchangeError::Unusable { entry, tensor, reason });
            }
            entries.push(IdentifiedEntry {
                name: unusable.name.clone(),
                dtype: String::new(),
                shape: Vec::new(),
                taken: Taken::Nothing,
                why: unusable.reason.clone(),
                candidates: Vec::new(),
            });
        }
        // A cache that nobody wrote is a finding, and one that was saved before the run is none.
        let missing = undated.iter().find(|(_, tensor)| {
            let rows = format!("{}_written_rows", tensor.trim_end_matches("_cache"));
            !outputs.contains_key(tensor.as_str()) && !written.contains_key(rows.as_str())
        });
        if let Some((entry, tensor)) = missing {
            return Err(ExchangeError::When { entry: (*entry).clone(), tensor: tensor.clone() });
        }
        let mut chosen: BTreeMap<String, Found> =
            written.into_iter().map(|(tensor, (_, found))| (tensor.to_owned(), found)).collect();
        for (tensor, found) in outputs {
            let shape = self.targets.iter().find(|target| target.name == tensor).map(|target| target.shape.clone());
            let found = Found { index: self.choose(tensor, &found)?, shape: shape.unwrap_or_default() };
            chosen.insert(tensor.to_owned(), found);
        }
        if chosen.is_empty() {
            return Err(ExchangeError::Nothing(nearest(&entries)));
        }
        Ok(Identified { entries, outputs: chosen, remarks: self.dump.remarks.clone() })
    }

    /// Whether an entry is rows written into a cache, by the map or by its name.
    fn written(&self, name: &str, array: &Array) -> Result<Option<&'static str>, ExchangeError> {
        let called = self.map.get(name).map_or(name, String::as_str);
        let Some((tensor, dtype, dimensions)) = targets::written(called) else { return Ok(None) };
        if array.dtype == dtype && array.shape.len() == dimensions {
            return Ok(Some(tensor));
        }
        Err(ExchangeError::Type {
            entry: name.to_owned(),
            tensor: tensor.to_owned(),
            found: format!("{} {:?}", array.dtype, array.shape),
            expected: format!("{dtype} of {dimensions} dimensions"),
        })
    }

    /// What the map or the entry's own name says: a tensor, or that it is none; with where that is said.
    fn given(&self, name: &str) -> Option<(Option<&'a Target>, &'static str)> {
        match self.map.get(name).map(String::as_str) {
            Some(IGNORE) => Some((None, "left out by the map")),
            Some(tensor) => Some((self.targets.iter().find(|target| target.name == *tensor), "by the map")),
            None => targets::named(self.targets, name).map(|target| (Some(target), "by its name")),
        }
    }

    /// Tensors of an entry's type and shape, nearest first.
    fn candidates(&self, array: &Array) -> Vec<(&'a Target, Distance)> {
        let fitting = self.targets.iter().filter(|target| target.dtype == array.dtype && target.fits(&array.shape));
        let mut candidates: Vec<_> =
            fitting.map(|target| (target, Distance::between(array.dtype, &array.bytes, &target.bytes))).collect();
        candidates.sort_by(|(_, a), (_, b)| a.squared.total_cmp(&b.squared));
        candidates
    }

    /// Refuses an entry that is not what it is called.
    fn check(
        &self,
        name: &str,
        array: &Array,
        target: &Target,
        candidates: &[(&Target, Distance)],
    ) -> Result<(), ExchangeError> {
        let Some((_, own)) = candidates.iter().find(|(candidate, _)| candidate.name == target.name) else {
            return Err(ExchangeError::Type {
                entry: name.to_owned(),
                tensor: target.name.clone(),
                found: format!("{} {:?}", array.dtype, array.shape),
                expected: format!("{} {:?}", target.dtype, target.shape),
            });
        };
        let (holds, of) = match said(candidates) {
            Said::Is(other) if other.name != target.name => (Some(other), format!("; it holds {}", other.name)),
            Said::OneOf(same) => (None, format!("; it holds {}", joined(&same, " or "))),
            _ => (None, String::new()),
        };
        let must_equal = match target.kind {
            Kind::Input | Kind::Half => true,
            Kind::Cache => self.moment(name) == Moment::Before,
            Kind::Output => false,
        };
        if must_equal && !own.is_equal() {
            return Err(other_input(name, array, target, own, of + &self.circle(name, target)));
        }
        match holds {
            Some(other) if !own.is_equal() => {
                let of_other = candidates.iter().find(|(candidate, _)| candidate.name == other.name);
                let (equal, elements) = of_other.map_or((0, 0), |(_, found)| (found.equal, found.elements));
                let (entry, tensor, holds) = (name.to_owned(), target.name.clone(), other.name.clone());
                Err(ExchangeError::Swapped { entry, tensor, holds, equal, elements })
            }
            _ => Ok(()),
        }
    }

    /// What a RoPE table that is bound wrongly shows by itself: the squares of a cosine and a sine add up to 1.
    fn circle(&self, name: &str, target: &Target) -> String {
        let other = match target.name.strip_prefix("rope_cos") {
            Some(part) => format!("rope_sin{part}"),
            None => match target.name.strip_prefix("rope_sin") {
                Some(part) => format!("rope_cos{part}"),
                None => return String::new(),
            },
        };
        let bound = |tensor: &str| {
            let is = |entry: &str| {
                self.given(entry).and_then(|(target, _)| target).is_some_and(|target| target.name == tensor)
            };
            self.dump.arrays.iter().find(|array| is(&array.name))
        };
        let (Some(one), Some(other)) = (self.dump.arrays.iter().find(|array| array.name == name), bound(&other)) else {
            return String::new();
        };
        let values =
            |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes))).collect();
        let (a, b): (Vec<f64>, Vec<f64>) = (values(&one.array.bytes), values(&other.array.bytes));
        // Each of the two is rounded once: half a unit of 2^-24 for values up to 1, twice, in both squares.
        let on = |&(a, b): &(&f64, &f64)| (a * a + b * b - 1.0).abs() <= 4.0 * f64::from(f32::EPSILON);
        let off = a.iter().zip(&b).filter(|pair| !on(pair));
        match off.count() {
            0 => String::new(),
            n => format!("; with `{}` beside it cos^2 + sin^2 is not 1 at {n} of {} places", other.name, a.len()),
        }
    }

    /// What becomes of an entry that is known to be a tensor.
    fn take(&self, name: &str, array: &Array, target: &Target, why: &str) -> Result<(Taken, String), ExchangeError> {
        let moment = self.moment(name);
        let equal = || Distance::between(array.dtype, &array.bytes, &target.bytes);
        let nothing = |what: &str| Ok((Taken::Nothing, format!("{what} ({}, {why})", target.name)));
        match target.kind {
            Kind::Input | Kind::Half => {
                let found = equal();
                if !found.is_equal() {
                    return Err(other_input(name, array, target, &found, String::new()));
                }
                Ok((Taken::Input(target.name.clone()), why.to_owned()))
            }
            _ if moment == Moment::Unwritten => nothing("taken before it was written"),
            Kind::Output if moment == Moment::Before => nothing("taken before the run"),
            Kind::Cache if moment != Moment::After && equal().is_equal() => {
                Ok((Taken::Input(target.name.clone()), format!("{why}, before the run")))
            }
            Kind::Cache => Ok((Taken::Output(target.name.clone()), format!("{why}, after the run"))),
            Kind::Output => Ok((Taken::Output(target.name.clone()), why.to_owned())),
        }
    }

    /// When an entry was taken: directories of goldens and records of arguments say it.
    fn moment(&self, name: &str) -> Moment {
        if let Some(record) = self.dump.records.iter().find(|record| record.name == name) {
            return match (record.role, record.stage) {
                (Role::Output, Stage::BeforeDispatch) => Moment::Unwritten,
                (Role::InOut, Stage::BeforeDispatch) => Moment::Before,
                (Role::Output | Role::InOut, Stage::AfterCompletion) => Moment::After,
                (Role::Input, _) => Moment::Unknown,
            };
        }
        let folder = name.rsplit_once('/').map(|(before, _)| before.rsplit('/').next().unwrap_or(before));
        match folder {
            Some("in") => Moment::Before,
            Some("out") => Moment::After,
            _ => Moment::Unknown,
        }
    }

    /// The entry that a tensor is taken from, of several: equal ones are one, and of a cache the latest holds all that
    /// the others do.
    fn choose(&self, tensor: &str, found: &[Output<'_>]) -> Result<usize, ExchangeError> {
        let Some(first) = found.first() else { return Err(ExchangeError::Nothing(String::new())) };
        let differing = found.iter().find(|output| output.array.bytes != first.array.bytes);
        let Some(differing) = differing else { return Ok(first.index) };
        let twice = |first: &str, second: &str| ExchangeError::Twice {
            first: first.to_owned(),
            second: second.to_owned(),
            tensor: tensor.to_owned(),
        };
        let before = self.targets.iter().find(|target| target.name == tensor && target.kind == Kind::Cache);
        let Some(before) = before else { return Err(twice(first.entry, differing.entry)) };
        let row = before.shape.last().map_or(1, |columns| columns * before.dtype.bitsize() / 8).max(1);
        let rows = |bytes: &'_ [u8]| bytes.chunks_exact(row).map(<[u8]>::to_vec).collect::<Vec<_>>();
        let initial = rows(&before.bytes);
        let written = |output: &Output<'_>| {
            rows(&output.array.bytes).iter().zip(&initial).filter(|(after, before)| after != before).count()
        };
        let Some(latest) = found.iter().max_by_key(|output| written(output)) else { return Ok(first.index) };
        let last = rows(&latest.array.bytes);
        let part = |output: &&Output<'_>| {
            let all = rows(&output.array.bytes);
            all.iter().zip(initial.iter().zip(&last)).all(|(row, (before, last))| row == before || row == last)
        };
        match found.iter().find(|output| !part(output)) {
            Some(other) => Err(twice(latest.entry, other.entry)),
            None => Ok(latest.index),
        }
    }
}

impl From<&(&Target, Distance)> for Candidate {
    fn from((target, distance): &(&Target, Distance)) -> Self {
        Self { tensor: target.name.clone(), distance: *distance, relative: distance.relative() }
    }
}

/// The refusal of an entry that is not the input that it is called.
fn other_input(name: &str, array: &Array, target: &Target, found: &Distance, holds: String) -> ExchangeError {
    ExchangeError::Input {
        entry: name.to_owned(),
        tensor: target.name.clone(),
        differing: found.elements - found.equal,
        elements: found.elements,
        first: first_difference(array, target),
        holds,
    }
}

fn refuse_alike(alike: &BTreeMap<String, Vec<String>>) -> Result<(), ExchangeError> {
    let groups: Vec<String> = alike
        .iter()
        .map(|(tensors, entries)| {
            let are = if entries.len() == 1 { "is" } else { "are each" };
            format!("{} {are} one of {tensors}, which hold the same and cannot be told apart", entries.join(", "))
        })
        .collect();
    if groups.is_empty() { Ok(()) } else { Err(ExchangeError::Alike(groups.join("; "))) }
}

/// What the entries are that were taken as nothing: those of one type and shape together.
fn nearest(entries: &[IdentifiedEntry]) -> String {
    let mut groups: BTreeMap<(&str, &[usize]), Vec<&IdentifiedEntry>> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.taken == Taken::Nothing) {
        groups.entry((&entry.dtype, &entry.shape)).or_default().push(entry);
    }
    let told = groups.iter().take(FEW).map(|((dtype, shape), entries)| {
        let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).take(FEW).collect();
        let cannot = if entries.len() > 1 { " cannot be told apart" } else { "" };
        let best = entries.first().and_then(|entry| entry.candidates.first());
        let why = match best {
            Some(best) => format!(
                "nearest to the first is {}, with {} of {} elements equal",
                best.tensor, best.distance.equal, best.distance.elements
            ),
            None => entries.first().map(|entry| entry.why.clone()).unwrap_or_default(),
        };
        format!("; {} of {dtype} {shape:?}{cannot}: {why}", names.join(", "))
    });
    told.collect()
}
