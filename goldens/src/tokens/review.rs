//! What a pending golden would change, for whoever is to accept it.

use serde::Serialize;

use super::diff;
use super::golden::{Golden, Row, Step};
use super::store::Standing;

/// A pending golden beside the accepted one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Review {
    /// The golden.
    pub name: String,
    /// Whether nothing was accepted under this name before.
    pub new: bool,
    /// What to know before accepting it.
    pub remarks: Vec<String>,
    /// What differs outside the rows: model, rounding rules, limits.
    pub settings: Vec<String>,
    /// The rows that differ, or all of a new one.
    pub rows: Vec<RowReview>,
}

/// A row of both.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RowReview {
    /// The row.
    pub row: usize,
    /// Steps of the pending one.
    pub steps: usize,
    /// Steps of it at which a right device may choose otherwise.
    pub near_ties: usize,
    /// The first step whose id differs.
    pub first_change: Option<usize>,
    /// Ids that are gone with `-`, ids that are new with `+`, one a line.
    pub ids: String,
    /// Both texts in one, where both have one and they differ: `[-gone-]`, `{+new+}`.
    pub text: Option<String>,
    /// Steps that are no longer, or newly, firm.
    pub kinds: Vec<String>,
    /// Steps of the same id whose margin is another one.
    pub margins_changed: usize,
    /// The largest such change, in logits.
    pub largest_margin_change: f32,
}

/// What `pending` would change of what is accepted, which may be a file that is no golden.
#[must_use]
pub fn review_standing(standing: &Standing, pending: &Golden) -> Review {
    let unread = standing.unread.as_ref().map(|error| {
        format!(
            "what is accepted cannot be read as a golden, so that nothing is compared; accepting replaces it: {error}"
        )
    });
    Review { remarks: unread.into_iter().collect(), ..review(standing.golden.as_ref(), pending) }
}

/// What `pending` would change.
#[must_use]
pub fn review(accepted: Option<&Golden>, pending: &Golden) -> Review {
    let row_of = |golden: Option<&Golden>, row: usize| golden.and_then(|golden| golden.rows.get(row).cloned());
    let rows = pending.rows.len().max(accepted.map_or(0, |golden| golden.rows.len()));
    let rows = (0..rows).filter_map(|row| {
        let (before, after) = (row_of(accepted, row), row_of(Some(pending), row));
        (before != after).then(|| row_review(row, before.as_ref().zip(accepted), after.as_ref().zip(Some(pending))))
    });
    Review {
        name: pending.name.clone(),
        new: accepted.is_none(),
        remarks: Vec::new(),
        settings: accepted.map_or_else(Vec::new, |accepted| settings(accepted, pending)),
        rows: rows.collect(),
    }
}

/// The lines before the rows that differ.
fn settings(accepted: &Golden, pending: &Golden) -> Vec<String> {
    let head = |golden: &Golden| {
        let plain = Golden { rows: Vec::new(), accepted: None, ..golden.clone() };
        plain.to_yaml()
    };
    let changed = diff::lines(&head(accepted), &head(pending));
    let of_file = |line: &&str| {
        (line.starts_with('+') || line.starts_with('-')) && !line.starts_with("---") && !line.starts_with("+++")
    };
    changed.lines().filter(of_file).map(str::to_owned).collect()
}

fn row_review(row: usize, before: Option<(&Row, &Golden)>, after: Option<(&Row, &Golden)>) -> RowReview {
    let ids = |of: Option<(&Row, &Golden)>| of.map_or_else(Vec::new, |(row, _)| row.token_ids());
    let (ids_before, ids_after) = (ids(before), ids(after));
    let lines =
        |ids: &[usize]| ids.iter().enumerate().map(|(step, id)| format!("step {step}: {id}\n")).collect::<String>();
    let common = ids_before.iter().zip(&ids_after).take_while(|(before, after)| before == after).count();
    let differs = ids_before.len() != ids_after.len() || common < ids_after.len();
    let mut kinds = Vec::new();
    let (mut margins_changed, mut largest) = (0, 0f32);
    if let (Some((row_before, golden_before)), Some((row_after, golden_after))) = (before, after) {
        // Beyond the first other id the two are different texts, whose steps have nothing to do with one another.
        for (step, (one, other)) in row_before.steps.iter().zip(&row_after.steps).take(common).enumerate() {
            let (was, is) = (one.kind(golden_before), other.kind(golden_after));
            if was != is {
                kinds.push(format!("step {step}: {} is now {}, {}", was.name(), is.name(), moved(one, other)));
            }
            if one.margin().to_bits() != other.margin().to_bits() {
                margins_changed += 1;
                largest = largest.max((one.margin() - other.margin()).abs());
            }
        }
    }
    let text = |of: Option<(&Row, &Golden)>| of.and_then(|(row, _)| row.text.clone());
    let near = |(row, golden): (&Row, &Golden)| {
        row.steps.iter().filter(|step| step.kind(golden) == super::golden::Kind::NearTie).count()
    };
    RowReview {
        row,
        steps: ids_after.len(),
        near_ties: after.map_or(0, near),
        first_change: differs.then_some(common),
        ids: diff::lines(&lines(&ids_before), &lines(&ids_after)),
        text: text(before).zip(text(after)).filter(|(a, b)| a != b).map(|(a, b)| diff::texts(&a, &b)),
        kinds,
        margins_changed,
        largest_margin_change: largest,
    }
}

fn moved(before: &Step, after: &Step) -> String {
    format!(
        "margin {} and spread {} before, {} and {} now",
        before.margin(),
        before.spread(),
        after.margin(),
        after.spread()
    )
}

#[cfg(test)]
mod tests {
    use super::super::golden::Stop;
    use super::super::golden::tests::{golden, row, step};
    use super::*;

    fn small(second: f32, last: usize) -> Golden {
        let steps = vec![
            step(&[(5, 9.0, 0.0), (7, second, 0.125)]),
            step(&[(6, 9.0, 0.0), (7, 2.5, 0.125)]),
            step(&[(last, 9.0, 0.0), (7, 2.5, 0.125)]),
        ];
        let mut golden = golden(vec![row(&[1], Stop::MaxNewTokens, steps)]);
        golden.rows[0].text = Some(format!("text {last}"));
        golden
    }

    #[test]
    fn what_is_equal_is_not_shown() {
        let found = review(Some(&small(2.5, 8)), &small(2.5, 8));
        assert!(found.rows.is_empty() && found.settings.is_empty() && !found.new);
    }

    #[test]
    fn changed_ids_texts_kinds_and_settings_are_shown() {
        let mut pending = small(8.75, 9);
        pending.limits.max_seq_len = 300;
        let found = review(Some(&small(2.5, 8)), &pending);
        assert_eq!(found.settings, ["-  max_seq_len: 256", "+  max_seq_len: 300"]);
        let row = &found.rows[0];
        assert_eq!((row.first_change, row.near_ties, row.margins_changed), (Some(2), 1, 1));
        assert_eq!(row.largest_margin_change, 6.25);
        assert_eq!(row.text.as_deref(), Some("text [-8-]{+9+}"));
        assert!(row.ids.contains("-step 2: 8\n+step 2: 9\n"), "{}", row.ids);
        assert_eq!(row.kinds, ["step 0: firm is now near_tie, margin 6.5 and spread 0.125 before, 0.25 and 0.125 now"]);
    }

    #[test]
    fn a_new_golden_and_a_lost_row_are_shown_whole() {
        let found = review(None, &small(2.5, 8));
        assert!(found.new && found.rows[0].ids.contains("+step 2: 8"));
        let mut two = small(2.5, 8);
        two.rows.push(two.rows[0].clone());
        let found = review(Some(&two), &small(2.5, 8));
        assert_eq!((found.rows.len(), found.rows[0].row, found.rows[0].steps), (1, 1, 0));
        assert!(found.rows[0].ids.contains("-step 2: 8"));
    }
}
