//! What is wrong whatever freedoms permit: numbers that are not finite, and rows that are all zero, where those of the
//! reference's own run are not. This needs nothing else of the capture, so that it is seen where nothing can be compared.

use std::collections::{BTreeMap, BTreeSet};

use half::bf16;
use ndarray::{ArrayView1, Axis, s};
use reference::model::ModelError;
use reference::{Policy, TensorId};

use super::Run;
use super::alone::Alone;
use super::caches::At;
use super::choice::Head;
use super::history::History;
use super::layers::Behind;
use super::reports::HIDDEN;
use crate::Mark;
use crate::place::{counted, number};
use crate::report::{Check, Verdict};

/// The name of the check.
const FINITE: &str = "finite";

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Certain {
    /// The reference's own run; `None` where nothing captured asks for it.
    pub(super) alone: Option<Alone>,
    /// By tensor: how many numbers are not finite where the reference's are, and in which batch rows.
    nonfinite: BTreeMap<&'static str, (u64, BTreeSet<usize>)>,
    /// Of the logits, the row, step and place of each, and the reference's.
    pub(super) logits: BTreeMap<(usize, usize, usize), f32>,
    /// Numbers that the inputs make not finite in the reference's run too.
    by_inputs: u64,
}

/// Whether a state or a cache row holds nothing but zeros.
fn dead(row: ArrayView1<'_, bf16>) -> bool {
    row.iter().all(|x| x.to_f32() == 0.0)
}

/// Marks of a row that has nothing to be compared with: what is certainly wrong drifts, the rest is skipped.
pub(super) fn marks(device: ArrayView1<'_, bf16>, reference: ArrayView1<'_, bf16>) -> Vec<Mark> {
    // A device may flush what is below the normal numbers.
    let zeros = dead(device) && reference.iter().any(|x| x.is_normal());
    let mark = |(device, reference): (&bf16, &bf16)| {
        let infinite = !device.is_finite() && reference.is_finite();
        if infinite || (zeros && reference.is_normal()) { Mark::Drift } else { Mark::Skipped }
    };
    device.iter().zip(reference).map(mark).collect()
}

impl Certain {
    fn count(&mut self, name: &'static str, row: Option<usize>, device: f32, reference: Option<f32>) {
        if device.is_finite() {
            return;
        }
        if reference.is_some_and(|reference| !reference.is_finite()) {
            self.by_inputs += 1;
            return;
        }
        let (count, rows) = self.nonfinite.entry(name).or_default();
        *count += 1;
        rows.extend(row);
    }

    /// The check `finite`.
    pub(super) fn check(&self) -> Check {
        let (verdict, detail) = if self.nonfinite.is_empty() {
            let detail = match self.by_inputs {
                0 => "every captured number is finite".to_owned(),
                n => format!("{n} numbers are not finite, where the inputs make the reference so too"),
            };
            (Verdict::Pass, detail)
        } else {
            let one = |(name, (count, rows)): (&&str, &(u64, BTreeSet<usize>))| {
                let rows: Vec<usize> = rows.iter().copied().collect();
                let rows = if rows.is_empty() { String::new() } else { format!(", {}", counted("row", &rows)) };
                format!("{name}: {}{rows}", number(*count as usize, "number is not finite", "numbers are not finite"))
            };
            (Verdict::Fail, self.nonfinite.iter().map(one).collect::<Vec<_>>().join("; "))
        };
        Check { name: FINITE.to_owned(), verdict, detail }
    }

    /// Whether a tensor holds a number that is not finite and should be.
    pub(super) fn holds(&self, name: &str) -> bool {
        self.nonfinite.contains_key(name)
    }
}

impl Run<'_> {
    /// Whether a place's cache rows of a layer are compared.
    pub(super) fn compared(
        &self,
        history: Option<&History>,
        behind: &[Option<Behind>; 2],
        layer: usize,
        index: usize,
    ) -> bool {
        if layer == 0 {
            return history.is_some_and(|history| history.written[index].is_some());
        }
        let phase = usize::from(self.plan.step_of(self.plan.places[index]).is_some());
        behind[phase].as_ref().is_some_and(|behind| behind.indices.contains(&index))
    }

    /// Looks at every captured number. The reference runs only where one of them asks for it.
    pub(super) fn certain(
        &self,
        head: &Head<'_>,
        history: Option<&History>,
        behind: &[Option<Behind>; 2],
        policy: &Policy,
    ) -> Result<Certain, ModelError> {
        if !self.suspect(history, behind) {
            return Ok(Certain::default());
        }
        self.progress.step("the reference's own run");
        let plan = self.plan;
        let fed: Vec<Option<usize>> = (0..plan.places.len())
            .map(|index| {
                let place = plan.places[index];
                let told = history.and_then(|history| history.fed[index]);
                told.or_else(|| {
                    let step = plan.step_of(place)?;
                    self.given.token_ids.and_then(|ids| usize::try_from(ids[(place.row, step)]).ok())
                })
            })
            .collect();
        let choose = |state: ndarray::ArrayView2<'_, bf16>| {
            // Where the inputs give NaN no token is the right one, and none makes a difference.
            let choices = head.choices(state, &[], policy);
            choices.first().and_then(|choice| choice.token).unwrap_or_default()
        };
        let alone = Alone::run(self.weights, plan, &fed, [self.cos, self.sin], policy, choose)?;

        let mut found = Certain::default();
        for (id, cache, reference) in
            [(TensorId::KRows, &self.caches[0], &alone.k), (TensorId::VRows, &self.caches[1], &alone.v)]
        {
            for (at, values) in cache.iter().flat_map(|cache| cache.each(plan)) {
                for (column, value) in values.iter().enumerate() {
                    let reference = at.map(|(layer, index, kv_head)| {
                        reference[layer][(index, kv_head * plan.geometry.head_dim + column)].to_f32()
                    });
                    let row = at.map(|(_, index, _)| plan.places[index].row);
                    found.count(id.name(), row, value.to_f32(), reference);
                }
            }
        }
        for index in 0..plan.places.len() {
            let (place, Some(state)) = (plan.places[index], self.state_at(index)) else { continue };
            let name = HIDDEN[usize::from(plan.step_of(place).is_some())];
            for (device, reference) in state.iter().zip(alone.hidden.row(index)) {
                found.count(name, Some(place.row), device.to_f32(), Some(reference.to_f32()));
            }
        }
        if let Some(logits) = self.given.top2_logits {
            for ((row, step, j), &device) in logits.indexed_iter().filter(|(_, logit)| !logit.is_finite()) {
                let source = plan.index(plan.source(row, step));
                let state = alone.hidden.slice(s![source..=source, ..]);
                let choices = head.choices(state, &[], policy);
                let id = self.given.top2_ids.and_then(|ids| usize::try_from(ids[(row, step, j)]).ok());
                let reference = choices.first().map(|choice| {
                    let id = id.filter(|&id| id < choice.logits.len()).or(choice.token);
                    id.and_then(|id| choice.logit(id)).unwrap_or(f32::NAN)
                });
                found.count("top2_logits", Some(row), device, reference);
                if let Some(reference) = reference.filter(|reference| reference.is_finite()) {
                    found.logits.insert((row, step, j), reference);
                }
            }
        }
        found.alone = Some(alone);
        Ok(found)
    }

    /// Whether a captured number is not finite, or a row that is not compared all zero.
    fn suspect(&self, history: Option<&History>, behind: &[Option<Behind>; 2]) -> bool {
        let plan = self.plan;
        let logits = self.given.top2_logits.is_some_and(|logits| logits.iter().any(|logit| !logit.is_finite()));
        let infinite = |row: ArrayView1<'_, bf16>| row.iter().any(|x| !x.is_finite());
        let state = |index: usize| {
            let phase = usize::from(plan.step_of(plan.places[index]).is_some());
            let judged = behind[phase].as_ref().is_some_and(|behind| behind.hidden.is_some());
            self.state_at(index).is_some_and(|state| infinite(state) || (!judged && dead(state)))
        };
        let row = |(at, values): (Option<At>, ArrayView1<'_, bf16>)| {
            let alone = at.is_some_and(|(layer, index, _)| !self.compared(history, behind, layer, index));
            infinite(values) || (alone && dead(values))
        };
        logits
            || (0..plan.places.len()).any(state)
            || self.caches.iter().flatten().any(|cache| cache.each(plan).into_iter().any(row))
    }

    /// What is certainly wrong in a place's state that is not compared.
    pub(super) fn certain_state(&self, certain: &Certain, index: usize) -> Option<Vec<Mark>> {
        let (alone, state) = (certain.alone.as_ref()?, self.state_at(index)?);
        let marks = marks(state, alone.hidden.index_axis(Axis(0), index));
        marks.contains(&Mark::Drift).then_some(marks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array1;

    #[test]
    fn only_what_no_freedom_gives_drifts() {
        let row = |values: [f32; 3]| Array1::from_iter(values.map(bf16::from_f32));
        let of = |device: [f32; 3], reference: [f32; 3]| marks(row(device).view(), row(reference).view());
        let (drift, skipped) = (Mark::Drift, Mark::Skipped);
        assert_eq!(of([1.0, f32::NAN, 0.0], [5.0, 2.0, 2.0]), [skipped, drift, skipped]);
        assert_eq!(of([1.0, f32::NAN, f32::INFINITY], [5.0, f32::NAN, f32::NAN]), [skipped; 3]);
        assert_eq!(of([0.0, -0.0, 0.0], [5.0, 0.0, 2.0]), [drift, skipped, drift]);
        // Small enough to be flushed.
        assert_eq!(of([0.0; 3], [1e-40, 0.0, -1e-40]), [skipped; 3]);
    }
}
