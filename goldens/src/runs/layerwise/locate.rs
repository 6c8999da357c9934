//! From comparisons to the place where drift is made first, in order of execution.

use std::collections::BTreeSet;

use device::{Moment, state_name};
use reference::TensorId;

use super::known::moment_of;
use super::report::{Drift, Later};
use super::survey::{Point, Survey, What};
use crate::runs::findings::{Findings, Pair};

/// The name of a tensor in reports.
fn name(what: What, layer: usize, moment: Moment) -> String {
    match what {
        What::K => format!("{}_written_values", TensorId::KRows.name().trim_end_matches("_rows")),
        What::V => format!("{}_written_values", TensorId::VRows.name().trim_end_matches("_rows")),
        What::State => state_name(layer, moment),
    }
}

/// Every moment, layer and tensor that drifts, in order of execution.
fn drifting(survey: &Survey<'_, '_, '_>, points: &[Point]) -> BTreeSet<(Moment, usize, What, usize)> {
    let plan = survey.walker.one.plan;
    let each = |point: &Point| -> Vec<_> {
        point.drifting().map(|index| (moment_of(plan, index), point.layer, point.what, point.start)).collect()
    };
    points.iter().flat_map(each).collect()
}

/// Where drift is made first.
pub fn first(survey: &Survey<'_, '_, '_>, points: &[Point]) -> Option<Drift> {
    let plan = survey.walker.one.plan;
    let (moment, layer, what, start) = drifting(survey, points).into_iter().next()?;
    let captured = survey.walker.held.iter().any(Option::is_some);
    // Cache rows that were judged and are right narrow it down: those of the layer follow from the state before it.
    let first_layer = match what {
        _ if start == layer => layer,
        What::State if captured => layer,
        What::K | What::V => layer - 1,
        What::State => start,
    };
    let here = |point: &&Point| point.layer == layer && point.start == start;
    let mut places: BTreeSet<usize> = BTreeSet::new();
    let mut tensors = Vec::new();
    for point in points.iter().filter(here) {
        let mut findings = Findings::new(&name(point.what, layer, moment), start == layer);
        let mut drifts = false;
        for (n, &index) in point.places.iter().enumerate().filter(|(_, index)| moment_of(plan, **index) == moment) {
            let place = plan.places[index];
            if point.judged.rows.contains(&n) {
                drifts = true;
                places.insert(index);
            }
            for (column, &mark) in point.judged.marks.row(n).iter().enumerate() {
                let pair = Pair::from([point.device[(n, column)], point.nominal[(n, column)]]);
                findings.add(mark, pair, place.row, || match (point.what, moment) {
                    (What::State, Moment::Prefill) => vec![plan.prompt_index(place), column],
                    (What::State, Moment::Step(_)) => vec![place.row, column],
                    _ => vec![place.row, place.position, column],
                });
            }
        }
        if drifts {
            point.judged.notes.iter().for_each(|note| findings.note(note.clone()));
            tensors.push((point.what, findings.finish()));
        }
    }
    tensors.sort_by_key(|(what, _)| *what);
    let rows: BTreeSet<usize> = places.iter().map(|&index| plan.places[index].row).collect();
    Some(Drift {
        step: moment,
        first_layer,
        last_layer: layer,
        forced: start == layer,
        rows: rows.into_iter().collect(),
        places: survey.names(places.into_iter()),
        tensors: tensors.into_iter().map(|(_, report)| report).collect(),
        next: next(moment, first_layer, layer, start == layer),
    })
}

/// Drift behind the first. `forced` says that later steps had the device's own cache rows.
pub fn later(survey: &Survey<'_, '_, '_>, points: &[Point], found: &Drift) -> Vec<Later> {
    let all = drifting(survey, points).into_iter();
    let behind = all.filter(|&(moment, layer, ..)| (moment, layer) != (found.step, found.last_layer));
    let mut later: Vec<Later> = behind
        .map(|(moment, layer, what, start)| {
            let own = if moment == found.step { start > found.last_layer } else { !survey.walker.derives() };
            Later { step: moment, layer, tensor: name(what, layer, moment), own }
        })
        .collect();
    later.dedup();
    later
}

/// What to do next.
fn next(moment: Moment, first: usize, last: usize, forced: bool) -> String {
    let when = match moment {
        Moment::Prefill => "in the prefill".to_owned(),
        Moment::Step(step) => format!("at decode step {step}"),
    };
    if first < last {
        let between = (first + last - 1) / 2;
        return format!(
            "capture `{}` and run this again, or let --fetch do it: the layers between are told apart by their states",
            state_name(between, moment)
        );
    }
    let mut said = format!("capture the intermediate tensors of layer {last} {when}");
    if !forced && let Some(before) = last.checked_sub(1) {
        said += &format!(", and `{}`, from which the layer alone can be judged", state_name(before, moment));
    }
    said + ": judged stage by stage they tell the stage and the cause (docs/bundles.md names them). A case of this layer cannot \
           be written from here, because a case's inputs are generated from a seed and this layer's are the device's own"
}
