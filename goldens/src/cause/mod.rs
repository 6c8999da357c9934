//! Which deviation from the contract gives what the device gave (`docs/verdicts.md`, Causes): the reference is run
//! with one fault of the catalogue at a time, then with small sets, beside the device's own tensors. The fault that
//! leaves the least distance is the cause if the gate's own rules find nothing left to fail beside it.

mod loss;
mod memo;
mod replay;

use std::collections::BTreeSet;

use rayon::prelude::*;
use reference::deviations::catalogue;
use reference::stages::stage_of;
use reference::{Deviation, Rounding, TensorId};

use crate::Mark;
use crate::bisect::{suspects, tensor_id};
use crate::judge::{Walk, Walker};
use crate::report::{Candidate, Cause, Explanation, Reproduced};
use crate::rules::Rules;
use crate::tally::Comparison;

use self::replay::Replay;

pub use self::memo::Memo;
pub use self::replay::written_rows;

/// Faults of a set, at most.
const MOST: usize = 3;
/// Candidates listed.
const LISTED: usize = 8;

/// Begins the note that names faults of equal bits.
pub const ALIKE: &str = "on this data it cannot be told from ";

/// Where drift was first made, as the search needs it.
struct First<'w> {
    /// The tensor of the first failure.
    id: TensorId,
    /// Its comparison, where its values fail rather than the places it was written to.
    comparison: Option<&'w Comparison>,
}

/// Looks for the cause of what a walk found. `first_divergence` is the report's.
pub fn explain(walker: &Walker<'_, '_>, walk: &Walk, first_divergence: Option<&str>) -> (Option<Cause>, Explanation) {
    let mut explanation = Explanation {
        candidates: Vec::new(),
        reproduced: Reproduced::default(),
        visible: first_divergence.is_some(),
        notes: Vec::new(),
    };
    let Some(first) = first_divergence.and_then(|name| first(walk, name)) else {
        explanation.notes.push(match first_divergence {
            None => "nothing fails, so that there is no cause to be found".to_owned(),
            Some(name) => format!("{name} fails in its type or its rows, which no deviation of the catalogue explains"),
        });
        return (None, explanation);
    };
    let catalogue = catalogue();
    let search = Search::new(walker, walk, &catalogue);
    if let Some(cause) = search.ties(&first, &mut explanation) {
        return (Some(cause), explanation);
    }
    let cause = search.run(&first, &mut explanation);
    (cause, explanation)
}

fn first<'w>(walk: &'w Walk, name: &str) -> Option<First<'w>> {
    let id = tensor_id(name)?;
    let comparison = walk.comparisons.iter().find(|c| c.id == id && c.fails());
    Some(First { id, comparison })
}

/// One search.
struct Search<'a, 'd> {
    walker: &'a Walker<'a, 'd>,
    /// The rules that the contract's walk settled on.
    rules: Rules,
    catalogue: &'a [Deviation],
    replay: Replay<'a, 'd>,
    /// Tensors that fail beside the contract.
    failing: BTreeSet<TensorId>,
}

/// A set of faults that was tried.
struct Tried<'a> {
    faults: Vec<&'a Deviation>,
    /// Distance from the device that is left.
    loss: f64,
    reproduced: Reproduced,
    /// What the device would have given, as a digest: faults of equal bits cannot be told apart.
    digest: u64,
}

impl<'a, 'd> Search<'a, 'd> {
    fn new(walker: &'a Walker<'a, 'd>, walk: &'a Walk, catalogue: &'a [Deviation]) -> Self {
        let rules = walk.rules.settled();
        let replay = Replay::new(walker, &rules.policy);
        let failing = walk.comparisons.iter().filter(|c| c.fails()).map(|c| c.id).collect();
        Self { walker, rules, catalogue, replay, failing }
    }

    /// Where every failing element is an exact tie that went the other way, each of them says so itself.
    fn ties(&self, first: &First<'_>, explanation: &mut Explanation) -> Option<Cause> {
        let comparison = first.comparison.filter(|c| c.violated && !c.drifts())?;
        let site = stage_of(first.id).sites.iter().copied().find(|&site| self.violated(comparison, site))?;
        let other = if self.rules.policy.at(site) == Rounding::Rne { Rounding::TiesAway } else { Rounding::Rne };
        let deviation = self.catalogue.iter().find(|deviation| deviation.rule == Some((site, other)))?;
        let ties = comparison.count(Mark::Tie);
        let reproduced = Reproduced { exact: ties, elements: ties };
        explanation.candidates.push(candidate(std::slice::from_ref(&deviation), 1.0, reproduced));
        explanation.reproduced = reproduced;
        let direction = if other == Rounding::TiesAway { "went away from zero" } else { "went to even" };
        let place = comparison.marks.indexed_iter().find(|(_, mark)| **mark == Mark::Tie).map(|(at, _)| at);
        let (name, at) = (first.id.name(), place.unwrap_or_default());
        let ties = if ties == 1 {
            format!("the tie at {name}[{}, {}] {direction}", at.0, at.1)
        } else {
            format!("{ties} ties of {name} {direction}")
        };
        explanation.notes.push(format!("every differing element of {name} is an exact tie at {}: {ties}", site.name()));
        let found = cause(std::slice::from_ref(&deviation), 1.0);
        Some(Cause { description: format!("{}: {ties}", found.description), ..found })
    }

    /// Whether the violation that a comparison notes is of this site.
    fn violated(&self, comparison: &Comparison, site: reference::Site) -> bool {
        let named = format!("{}:", site.name());
        let mixed = format!("the ties at {} ", site.name());
        comparison.notes.iter().any(|note| note.starts_with(&named) || note.starts_with(&mixed))
    }

    /// The search proper: single faults, then faults beside the best one.
    fn run(&self, first: &First<'_>, explanation: &mut Explanation) -> Option<Cause> {
        let contract = self.replay.contract_loss();
        let mut fixed: Vec<&Deviation> = Vec::new();
        let mut target = first.id;
        // The best set that makes the first tensor right, and the tensor that is still wrong beside it.
        let mut best: Option<(Cause, Option<TensorId>)> = None;
        while fixed.len() < MOST {
            let tried = self.try_all(target, &fixed);
            let Some(winner) = tried.first() else { break };
            if fixed.is_empty() {
                let gain = |tried: &Tried<'_>| (1.0 - tried.loss / contract).clamp(0.0, 1.0);
                let listed = tried.iter().take(LISTED);
                explanation.candidates = listed.map(|t| candidate(&t.faults, gain(t), t.reproduced)).collect();
            }
            let walk = self.walker.walk_beside(self.rules.clone(), true, &winner.faults);
            let left = walk.comparisons.iter().find(|c| c.fails() && self.failing.contains(&c.id)).map(|c| c.id);
            let whole = left.is_none() && !self.replay.caches_differ(&winner.faults);
            // The fault may be one of several: what makes the tensor in question right is kept, and the search goes on
            // at the next one. Behind a gap several faults may meet in one tensor.
            if whole || left.is_some_and(|left| left > target) {
                explanation.reproduced = winner.reproduced;
                best = Some((cause(&winner.faults, self.confidence(&tried)), left));
            }
            if whole {
                self.alike(&tried, explanation);
                break;
            }
            let Some(left) = left else { break };
            fixed.clone_from(&winner.faults);
            target = left.max(target);
        }
        match best {
            Some((cause, left)) => {
                explanation.notes.extend(left.map(|left| {
                    format!(
                        "this explains everything before {}, where something else is wrong that is not in the catalogue",
                        left.name()
                    )
                }));
                Some(cause)
            }
            None => {
                let closest = explanation.candidates.first().map_or_else(String::new, |c| {
                    format!("; the closest, {}, explains {:.0} % of the distance", c.id, (100.0 * c.score).floor())
                });
                explanation
                    .notes
                    .push(format!("none of the catalogue's deviations gives the device's values{closest}"));
                None
            }
        }
    }

    /// Every fault that can reach `target`, beside those that are settled, the best first.
    fn try_all(&self, target: TensorId, fixed: &[&'a Deviation]) -> Vec<Tried<'a>> {
        let captured = self.walker.evidence.tensors.keys().copied().collect();
        let (suspects, _) = suspects(target, &captured);
        let placed = matches!(target, TensorId::KRows | TensorId::VRows);
        let reaches = |deviation: &&Deviation| {
            suspects.iter().any(|stage| deviation.touches(stage)) || (placed && deviation.moves_writes())
        };
        // A site has one rule.
        let recast = |deviation: &Deviation| deviation.rule.map(|(site, _)| site);
        let held = |deviation: &Deviation, fault: &Deviation| {
            fault.id == deviation.id || recast(deviation).is_some() && recast(deviation) == recast(fault)
        };
        let new = |deviation: &&Deviation| {
            !deviation.is_asked_by(&self.rules.policy) && !fixed.iter().any(|fault| held(deviation, fault))
        };
        let candidates: Vec<&Deviation> = self.catalogue.iter().filter(reaches).filter(new).collect();
        let before = self.replay.loss(fixed).0;
        let mut tried: Vec<Tried<'_>> = candidates
            .into_par_iter()
            .map(|deviation| {
                let faults: Vec<&Deviation> = fixed.iter().copied().chain([deviation]).collect();
                let (loss, reproduced, digest) = self.replay.loss(&faults);
                Tried { faults, loss, reproduced, digest }
            })
            .filter(|tried| tried.loss < before)
            .collect();
        // Stable: of equal ones the first in the catalogue wins.
        tried.sort_by(|a, b| a.loss.total_cmp(&b.loss));
        tried
    }

    /// How sure the choice of the best is: of the distance from the device at the elements where the two best differ,
    /// the share that is the runner-up's; divided among faults of equal bits.
    fn confidence(&self, tried: &[Tried<'_>]) -> f64 {
        let Some(winner) = tried.first() else { return 0.0 };
        let alike = tried.iter().take_while(|other| other.digest == winner.digest).count().max(1);
        let runner_up = tried.get(alike).map_or(&[][..], |tried| &tried.faults);
        let (mine, theirs) = self.replay.duel(&winner.faults, runner_up);
        let share = if mine + theirs > 0.0 { theirs / (mine + theirs) } else { 0.5 };
        share / alike as f64
    }

    /// Says which faults give the winner's bits too.
    fn alike(&self, tried: &[Tried<'_>], explanation: &mut Explanation) {
        let Some(winner) = tried.first() else { return };
        let alike = tried[1..].iter().take_while(|other| other.digest == winner.digest);
        let names: Vec<String> = alike.map(|tried| joined(&tried.faults, |d| &d.id)).collect();
        if !names.is_empty() {
            explanation.notes.push(format!("{ALIKE}{}", names.join(", ")));
        }
    }
}

fn joined(faults: &[&Deviation], part: impl Fn(&Deviation) -> &str) -> String {
    faults.iter().map(|fault| part(fault)).collect::<Vec<_>>().join("+")
}

fn cause(faults: &[&Deviation], confidence: f64) -> Cause {
    let description = faults.iter().map(|fault| fault.description.as_str()).collect::<Vec<_>>().join("; and it ");
    Cause {
        id: joined(faults, |fault| &fault.id),
        site: joined(faults, |fault| fault.site),
        description: format!("the device {description}"),
        confidence,
    }
}

fn candidate(faults: &[&Deviation], score: f64, reproduced: Reproduced) -> Candidate {
    let Cause { id, site, description, .. } = cause(faults, 0.0);
    Candidate { id, site, description, score, reproduced }
}
