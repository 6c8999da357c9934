//! The reports on caches and last states, and which of them drifts first.

use std::collections::BTreeSet;

use half::bf16;
use ndarray::{ArrayView1, s};
use reference::bounds::Confidence;
use reference::{PAGE, Policy, TensorId};

use super::Run;
use super::behind::Judged;
use super::certain::{self, Certain};
use super::findings::{Findings, Pair};
use super::first::Fed;
use super::history::History;
use super::layers::Behind;
use super::steps;
use crate::Mark;
use crate::maps::{Axis, Grid, MOST_ACROSS, MOST_DOWN};
use crate::report::TensorReport;

/// The last layer's states, by phase.
pub(super) const HIDDEN: [&str; 2] = ["prefill_hidden", "decode_hidden"];

/// The capture's name of a cache's written rows.
pub(super) fn rows_name(id: TensorId) -> &'static str {
    if id == TensorId::KRows { "k_written_rows" } else { "v_written_rows" }
}

/// Says that another policy explains what the one asked for does not.
fn under_other(policy: &str) -> String {
    format!("behind layer 0 policy {policy} explains every element: ties there went by another rule than asked for")
}

impl Run<'_> {
    /// The reports on a cache: rows, then values.
    pub(super) fn cache_reports(
        &self,
        id: TensorId,
        values: bool,
        (history, behind, certain): (Option<&History>, &[Option<Behind>; 2], &Certain),
        confidence: Confidence,
        policy: &Policy,
    ) -> Vec<TensorReport> {
        let Some(cache) = &self.caches[usize::from(values)] else { return Vec::new() };
        let plan = self.plan;
        let dim = plan.geometry.head_dim;
        let mut findings = Findings::new(id.name(), plan.layers == 1).mapped(self.cache_grids());
        let mut unchanged = BTreeSet::new();
        let mut add = |layer: usize, index: usize, reference: ArrayView1<'_, bf16>, mark: &dyn Fn(usize) -> Mark| {
            let place = plan.places[index];
            for kv_head in 0..plan.geometry.num_key_value_heads {
                let listed = cache.listed(plan, layer, index, kv_head);
                let columns = kv_head * dim..(kv_head + 1) * dim;
                // Old bytes that are not the new ones: a write is missing, which the rows' report says.
                if listed.is_none() {
                    let same = |column: usize| cache.held[layer][(index, column)] == reference[column];
                    if columns.clone().all(same) {
                        unchanged.insert((layer, index, kv_head));
                    }
                    continue;
                }
                for column in columns {
                    let mark = mark(column);
                    let at = || vec![listed.unwrap_or(0), column % dim];
                    findings.add(
                        mark,
                        Pair::from([cache.held[layer][(index, column)], reference[column]]),
                        place.row,
                        at,
                    );
                    let slot = plan.slot(place);
                    findings.place(mark, &[[layer, place.position], [place.row, kv_head], [slot / PAGE, slot % PAGE]]);
                    if mark == Mark::Drift {
                        findings.drifts_at(Some(kv_head), Some(slot / PAGE));
                    }
                }
            }
        };
        if let Some(history) = history {
            for index in 0..plan.places.len() {
                if let Some(written) = &history.written[index] {
                    let reference = if values { &written.v } else { &written.k };
                    let device = cache.held[0].row(index);
                    add(0, index, ArrayView1::from(reference), &|column| {
                        history.mark(index, column, values, device[column])
                    });
                }
            }
        }
        for behind in behind.iter().flatten() {
            let (nominal, judged) =
                if values { (&behind.nominal.v, &behind.v) } else { (&behind.nominal.k, &behind.k) };
            for layer in 1..plan.layers {
                let Some(judged) = &judged[layer] else { continue };
                for (n, &index) in behind.indices.iter().enumerate() {
                    let device = cache.held[layer].row(index);
                    let reference = nominal[layer].row(n);
                    add(layer, index, reference, &|column| {
                        behind.mark(judged.marks[(n, column)], device[column], reference[column])
                    });
                }
            }
        }
        // Rows that nothing can be compared with.
        let mut wrong = BTreeSet::new();
        for (layer, index) in (0..plan.layers).flat_map(|layer| (0..plan.places.len()).map(move |index| (layer, index)))
        {
            let Some(alone) = &certain.alone else { break };
            if self.compared(history, behind, layer, index) {
                continue;
            }
            let reference = if values { &alone.v[layer] } else { &alone.k[layer] }.row(index);
            let device = cache.held[layer].row(index);
            let heads = (0..plan.geometry.num_key_value_heads).map(|head| s![head * dim..(head + 1) * dim]);
            let marks: Vec<Mark> =
                heads.flat_map(|head| certain::marks(device.slice(head), reference.slice(head))).collect();
            if marks.contains(&Mark::Drift) {
                wrong.insert((layer, index));
                add(layer, index, reference, &|column| marks[column]);
            }
        }
        for layer in 0..plan.layers {
            let of: Vec<usize> = wrong.iter().filter(|(l, _)| *l == layer).map(|&(_, index)| index).collect();
            if !of.is_empty() {
                let what = "not finite or all zero, where the reference's own run is not";
                findings.note(format!("layer {layer}, {what}: {}", plan.names(&of)));
            }
        }
        if let Some(history) = history {
            let drifting = history.drifting(values);
            if !drifting.is_empty() {
                findings.note(format!("layer 0, which follows from the token alone: {}", plan.names(&drifting)));
                findings.fail();
            }
            if !values && let Some(note) = self.other_position(history, &drifting, confidence, policy) {
                findings.note(note);
            }
            if history.by_other_rule.contains(&true) {
                findings.note(
                    "layer 0 is right but for ties at normed, which went by another rule than asked for".to_owned(),
                );
                findings.fail();
            }
        }
        for behind in behind.iter().flatten() {
            for (layer, judged) in (if values { &behind.v } else { &behind.k }).iter().enumerate() {
                for note in judged.iter().flat_map(|judged| &judged.notes) {
                    findings.note(format!("layer {layer}, {note}"));
                }
            }
            if let Some(policy) = behind.other_policy {
                findings.note(under_other(policy));
                findings.fail();
            }
        }
        let rows =
            cache.rows_report(rows_name(id), plan, |layer, index, head| unchanged.contains(&(layer, index, head)));
        vec![rows, findings.finish()]
    }

    /// Whether the first drifting keys are those of another position.
    pub(super) fn other_position(
        &self,
        history: &History,
        drifting: &[usize],
        confidence: Confidence,
        policy: &Policy,
    ) -> Option<String> {
        let [k, v] = self.caches;
        let index = drifting.iter().copied().find(|index| {
            let written = history.written[*index].as_ref();
            written.is_some_and(|written| !written.v_reached.contains(&false))
        })?;
        let place = self.plan.places[index];
        let fed = Fed {
            token: history.fed[index]?,
            position: place.position,
            decode: self.plan.step_of(place).is_some(),
            k: k.as_ref().map(|k| k.held[0].row(index)),
            v: v.as_ref().map(|v| v.held[0].row(index)),
        };
        let position = self.first(confidence)?.position_of(&fed, policy)?;
        Some(format!("{}: the key is rotated as position {position}, not {}", self.plan.name(index), place.position))
    }

    /// The reports on the last layer's states.
    pub(super) fn hidden_reports(&self, behind: &[Option<Behind>; 2], certain: &Certain) -> Vec<TensorReport> {
        let mut reports = Vec::new();
        for (phase, (name, behind)) in HIDDEN.into_iter().zip(behind).enumerate() {
            let Some((behind, judged)) = behind.as_ref().and_then(|b| Some((b, b.hidden.as_ref()?))) else {
                reports.extend(self.uncompared_states(phase == 1, certain));
                continue;
            };
            let mut findings = Findings::new(name, false).mapped(self.state_grids());
            for (n, &index) in behind.indices.iter().enumerate() {
                let (place, Some(device)) = (self.plan.places[index], self.state_at(index)) else { continue };
                for (column, &device) in device.iter().enumerate() {
                    let reference = behind.nominal.hidden[(n, column)];
                    let mark = behind.mark(judged.marks[(n, column)], device, reference);
                    findings.add(mark, Pair::from([device, reference]), place.row, || match self.plan.step_of(place) {
                        Some(step) => vec![step, place.row, column],
                        None => vec![self.plan.prompt_index(place), column],
                    });
                    findings.place(mark, &[[place.row, place.position], [place.row, column]]);
                }
            }
            judged.notes.iter().for_each(|note| findings.note(note.clone()));
            let rows: Vec<_> = behind.indices.iter().filter_map(|&index| self.state_at(index)).collect();
            if let Some(said) = steps::alive(rows.iter().flatten().map(|x| x.to_f64())) {
                findings.note(format!("all of it is {said}"));
            }
            if let Some(policy) = behind.other_policy {
                findings.note(under_other(policy));
                findings.fail();
            }
            reports.push(findings.finish());
        }
        reports
    }

    /// Axes of a cache's maps: layer by position, row by head, page by slot.
    fn cache_grids(&self) -> Option<Vec<Grid>> {
        let (plan, rows) = (self.plan, self.row_axis()?);
        let mut pages: Vec<usize> = plan.places.iter().map(|&place| plan.slot(place) / PAGE).collect();
        pages.sort_unstable();
        pages.dedup();
        let heads = Axis::whole("head", plan.geometry.num_key_value_heads, MOST_ACROSS);
        let slots = Axis::whole("slot of the page", PAGE, MOST_ACROSS);
        Some(vec![
            Grid::new(Axis::whole("layer", plan.layers, MOST_DOWN), self.position_axis()),
            Grid::new(rows, heads),
            Grid::new(Axis::listed("page", &pages, MOST_DOWN), slots),
        ])
    }

    /// Axes of the maps of states: row by position, row by column.
    fn state_grids(&self) -> Option<Vec<Grid>> {
        let rows = self.row_axis()?;
        let columns = Axis::whole("column", self.plan.geometry.hidden_size, MOST_ACROSS);
        Some(vec![Grid::new(rows.clone(), self.position_axis()), Grid::new(rows, columns)])
    }

    /// Rows, when maps are asked for.
    fn row_axis(&self) -> Option<Axis> {
        self.job.maps.then(|| Axis::whole("batch row", self.plan.rows(), MOST_DOWN))
    }

    fn position_axis(&self) -> Axis {
        let positions = self.plan.places.iter().map(|place| place.position + 1).max().unwrap_or(0);
        Axis::whole("position", positions, MOST_ACROSS)
    }

    /// The report on states that were captured and that nothing can be compared with.
    fn uncompared_states(&self, decode: bool, certain: &Certain) -> Option<TensorReport> {
        let plan = self.plan;
        let indices = plan.of_phase(decode);
        let states: Vec<_> = indices.iter().filter_map(|&index| self.state_at(index)).collect();
        if states.is_empty() {
            return None;
        }
        let mut findings = Findings::new(HIDDEN[usize::from(decode)], false);
        let mut wrong = Vec::new();
        for &index in &indices {
            let (Some(alone), Some(device)) = (&certain.alone, self.state_at(index)) else { continue };
            let Some(marks) = self.certain_state(certain, index) else { continue };
            wrong.push(index);
            let place = plan.places[index];
            for (column, mark) in marks.into_iter().enumerate() {
                let pair = Pair::from([device[column], alone.hidden[(index, column)]]);
                findings.add(mark, pair, place.row, || match plan.step_of(place) {
                    Some(step) => vec![step, place.row, column],
                    None => vec![plan.prompt_index(place), column],
                });
            }
        }
        if wrong.is_empty() {
            let what = "every number is finite and no row all zero, which is all that can be said without both caches";
            findings.note(format!("not compared: {what}"));
        } else {
            let what = "not finite or all zero, where the reference's own run is not";
            findings.note(format!("{what}: {}", plan.names(&wrong)));
            if let Some(said) = steps::alive(states.iter().flatten().map(|x| x.to_f64())) {
                findings.note(format!("all of it is {said}"));
            }
        }
        Some(findings.finish())
    }

    /// Of caches and states, the tensor that drifts first: in the prefill before the decode steps, in the earliest layer.
    pub(super) fn origin(&self, history: Option<&History>, behind: &[Option<Behind>; 2]) -> Option<&'static str> {
        let mut drifting: Vec<(usize, usize, usize, &'static str)> = Vec::new();
        let caches = [TensorId::KRows, TensorId::VRows];
        for (order, id) in caches.into_iter().enumerate() {
            for index in history.map(|history| history.drifting(order == 1)).unwrap_or_default() {
                let phase = usize::from(self.plan.step_of(self.plan.places[index]).is_some());
                drifting.push((phase, 0, order, id.name()));
            }
        }
        for (phase, behind) in behind.iter().enumerate().filter_map(|(phase, behind)| Some((phase, behind.as_ref()?))) {
            let drifts = |judged: &Option<Judged>| judged.as_ref().is_some_and(|judged| !judged.rows.is_empty());
            for (order, (id, layers)) in caches.into_iter().zip([&behind.k, &behind.v]).enumerate() {
                let layers = layers.iter().enumerate().filter(|(_, judged)| drifts(judged));
                drifting.extend(layers.map(|(layer, _)| (phase, layer, order, id.name())));
            }
            if drifts(&behind.hidden) {
                drifting.push((phase, self.plan.layers, 0, HIDDEN[phase]));
            }
        }
        drifting.into_iter().min().map(|(.., name)| name)
    }
}
