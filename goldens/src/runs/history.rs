//! Which token was fed at each place, and how the first layer's cache rows compare: they follow from the token alone.

use half::bf16;
use ndarray::Array2;
use reference::{Policy, Rounding, Site};

use super::first::{Fed, First, Written};
use super::plan::Plan;
use crate::Mark;
use crate::compare::same_bf16;
use crate::rules::{Rules, TieTally};

/// What the first layer's rows say.
#[derive(Debug)]
pub struct History {
    /// The token that was fed at each place; `None` where nothing tells.
    pub fed: Vec<Option<usize>>,
    /// Places at which another token was fed than the one reported.
    pub misreported: Vec<usize>,
    /// What each place's rows should be, where its token is known.
    pub written: Vec<Option<Written>>,
    /// Places whose rows only the other tie rule at `normed` gives, where a rule was asked for.
    pub by_other_rule: Vec<bool>,
}

/// Reads the tokens off the first layer's rows. `candidates` are the tokens that each place may have been fed, the
/// reported one first. One of the two caches is enough. The tie rule at `normed` is settled by the rows of decode steps, whose ties are known.
pub fn read(
    first: &First<'_>,
    plan: &Plan<'_>,
    [k, v]: [Option<&Array2<bf16>>; 2],
    candidates: &[Vec<usize>],
    rules: &mut Rules,
) -> History {
    let places = plan.places.len();
    let vocabulary = first.embed.nrows();
    let at = |index: usize, token: usize| {
        let place = plan.places[index];
        let decode = plan.step_of(place).is_some();
        Fed { token, position: place.position, decode, k: k.map(|k| k.row(index)), v: v.map(|v| v.row(index)) }
    };
    let judge = |at_tokens: &[(usize, usize)], policy: &Policy| {
        first.judge(&at_tokens.iter().map(|&(index, token)| at(index, token)).collect::<Vec<_>>(), policy)
    };
    let mut history = History {
        fed: vec![None; places],
        misreported: Vec::new(),
        written: vec![None; places],
        by_other_rule: vec![false; places],
    };
    let reported: Vec<(usize, usize)> = (0..places)
        .filter_map(|index| candidates[index].first().map(|&token| (index, token)))
        .filter(|&(_, token)| token < vocabulary)
        .collect();
    let asked = rules.policy.clone();
    let other = asked.clone().with(
        Site::Normed,
        if asked.at(Site::Normed) == Rounding::TiesAway { Rounding::Rne } else { Rounding::TiesAway },
    );
    let under_asked = judge(&reported, &asked);
    let under_other = judge(&reported, &other);

    let mut tally = TieTally::default();
    for (((index, _), asked_row), other_row) in reported.iter().zip(&under_asked).zip(&under_other) {
        tally.ties += asked_row.ties;
        let (by_asked, by_other) = (asked_row.unreached() == 0, other_row.unreached() == 0);
        if by_asked != by_other && plan.step_of(plan.places[*index]).is_some() {
            let rule = if by_asked { asked.at(Site::Normed) } else { other.at(Site::Normed) };
            let (count, place) = match rule {
                Rounding::TiesAway => (&mut tally.away, &mut tally.first_away),
                _ => (&mut tally.even, &mut tally.first_even),
            };
            *count += asked_row.ties;
            place.get_or_insert_with(|| plan.name(*index));
        }
    }
    let violated = rules.settle(Site::Normed, tally);
    let took_other = !violated && rules.policy.at(Site::Normed) != asked.at(Site::Normed);

    for (((index, token), asked_row), other_row) in reported.into_iter().zip(under_asked).zip(under_other) {
        let by_other = asked_row.unreached() > 0 && other_row.unreached() == 0;
        history.fed[index] = Some(token);
        history.by_other_rule[index] = violated && by_other;
        history.written[index] = Some(if took_other { other_row } else { asked_row });
    }
    // Rows that the reported token does not give may be those of another one.
    let rule = if violated { other } else { rules.policy.clone() };
    for index in 0..places {
        let unexplained = match &history.written[index] {
            Some(written) => written.unreached() > 0 && !history.by_other_rule[index],
            None => true,
        };
        if !unexplained {
            continue;
        }
        let others: Vec<(usize, usize)> = candidates[index]
            .iter()
            .skip(1)
            .filter(|&&token| token < vocabulary)
            .map(|&token| (index, token))
            .collect();
        let found = judge(&others, &rule);
        if let Some(((_, token), written)) = others.into_iter().zip(found).find(|(_, written)| written.unreached() == 0)
        {
            history.fed[index] = Some(token);
            history.written[index] = Some(written);
            history.misreported.push(index);
        }
    }
    history
}

impl History {
    /// The mark of an element of the first layer's K (or V).
    pub fn mark(&self, index: usize, column: usize, values: bool, device: bf16) -> Mark {
        let Some(written) = &self.written[index] else { return Mark::Skipped };
        let (reference, reached) =
            if values { (&written.v, &written.v_reached) } else { (&written.k, &written.k_reached) };
        if same_bf16(device, reference[column]) {
            Mark::Exact
        } else if self.by_other_rule[index] {
            Mark::Tie
        } else if reached[column] {
            Mark::Flip
        } else {
            Mark::Drift
        }
    }

    /// Places whose K (or V) holds something that nothing permitted gives.
    pub fn drifting(&self, values: bool) -> Vec<usize> {
        let drifts = |index: &usize| {
            let reached =
                |w: &Written| if values { w.v_reached.contains(&false) } else { w.k_reached.contains(&false) };
            !self.by_other_rule[*index] && self.written[*index].as_ref().is_some_and(reached)
        };
        (0..self.written.len()).filter(drifts).collect()
    }
}
