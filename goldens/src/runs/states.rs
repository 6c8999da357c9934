//! States that tokens are chosen from: the device's own where captured, otherwise the reference's on its history.

use half::bf16;
use ndarray::{Array2, ArrayView1, Axis};
use reference::Policy;

use super::Run;
use super::choice::{Choice, Head};
use super::layers::Behind;
use crate::spread::TESTS;

impl Run<'_> {
    /// What the LM head makes of each state that the device gave.
    pub(super) fn own_choices(&self, head: &Head<'_>, policy: &Policy) -> Vec<Option<Choice>> {
        let plan = self.plan;
        let mut choices = vec![None; plan.rows() * plan.steps()];
        let mut known = Vec::new();
        for row in 0..plan.rows() {
            for step in 0..plan.steps() {
                if let Some(state) = self.given.state(plan, row, step) {
                    known.push((row * plan.steps() + step, state, self.given.ids(row, step)));
                }
            }
        }
        let mut hidden = Array2::from_elem((known.len(), plan.geometry.hidden_size), bf16::ZERO);
        for (n, (_, state, _)) in known.iter().enumerate() {
            hidden.row_mut(n).assign(state);
        }
        let asked: Vec<Vec<usize>> = known.iter().map(|(.., ids)| ids.clone()).collect();
        for ((at, ..), choice) in known.iter().zip(head.choices(hidden.view(), &asked, policy)) {
            choices[*at] = Some(choice);
        }
        choices
    }

    /// The device's last hidden state of a place, where captured.
    pub(super) fn state_at(&self, index: usize) -> Option<ArrayView1<'_, bf16>> {
        let place = self.plan.places[index];
        match self.plan.step_of(place) {
            Some(step) => self
                .given
                .decode_hidden
                .map(|hidden| hidden.index_axis(Axis(0), step).index_axis_move(Axis(0), place.row)),
            None => self.given.prefill_hidden.map(|hidden| hidden.row(self.plan.prompt_index(place))),
        }
    }

    /// By step, whether the device's state is all zero and nothing says that it should be.
    pub(super) fn dead_states(&self, behind: &[Option<Behind>; 2]) -> Vec<bool> {
        let plan = self.plan;
        let right_zero = |index: usize| {
            behind.iter().flatten().any(|behind| {
                let n = behind.indices.iter().position(|&other| other == index);
                n.is_some_and(|n| behind.nominal.hidden.row(n).iter().all(|x| *x == bf16::ZERO))
            })
        };
        let dead = |row: usize, step: usize| {
            let state = self.given.state(plan, row, step);
            let zero = state.is_some_and(|state| state.iter().all(|x| *x == bf16::ZERO));
            zero && !right_zero(plan.index(plan.source(row, step)))
        };
        (0..plan.rows())
            .flat_map(|row| (0..plan.steps()).map(move |step| (row, step)))
            .map(|(r, s)| dead(r, s))
            .collect()
    }

    /// Choices from the reference's own states, where the device gave none. The result is how far the logits of a right
    /// device may be off them, at the run's false-alarm probability.
    pub(super) fn reference_choices(
        &self,
        head: &Head<'_>,
        policy: &Policy,
        behind: &[Option<Behind>; 2],
        choices: &mut [Option<Choice>],
    ) -> f64 {
        let plan = self.plan;
        let (mut squares, mut count) = (0f64, 0u64);
        let mut missing = 0;
        for behind in behind.iter().flatten() {
            let wanted: Vec<(usize, usize)> = behind
                .indices
                .iter()
                .enumerate()
                .filter_map(|(n, &index)| {
                    let place = plan.places[index];
                    // The last place of a prompt gives the first token, inner ones give none.
                    let step = (place.position + 1).checked_sub(plan.tokens.prompts[place.row].len())?;
                    let at = place.row * plan.steps() + step;
                    choices[at].is_none().then_some((n, at))
                })
                .collect();
            let rows: Vec<usize> = wanted.iter().map(|&(n, _)| n).collect();
            let found = head.choices(behind.nominal.hidden.select(Axis(0), &rows).view(), &[], policy);
            for (&(n, at), choice) in wanted.iter().zip(found) {
                missing += 1;
                let ids: Vec<usize> = choice.token.into_iter().chain(choice.runner_up(head.real)).collect();
                let nominal = head.logits_of(behind.nominal.hidden.row(n), &ids, policy);
                for (first, states) in &behind.states {
                    let Some(row) = n.checked_sub(*first).filter(|&row| row < states.nrows()) else { continue };
                    let sampled = head.logits_of(states.row(row), &ids, policy);
                    // Logits of one state move together: they count as one observation.
                    let moved = nominal.iter().zip(&sampled).map(|(a, b)| (a - b).powi(2));
                    squares += moved.fold(0.0, f64::max);
                    count += 1;
                }
                choices[at] = Some(choice);
            }
        }
        let chance = self.job.false_alarm / TESTS / (2 * missing.max(1)) as f64;
        student_bound(count, chance) * (squares / count.max(1) as f64).sqrt()
    }
}

/// A bound on Student's t: with `count` degrees of freedom it is exceeded, on either side, with a probability of at most
/// `chance`. The tail beyond `t >= 1` is below `(1 + t^2/n)^(-(n-1)/2)`.
fn student_bound(count: u64, chance: f64) -> f64 {
    if count < 2 {
        return f64::INFINITY;
    }
    let n = count as f64;
    (n * (chance.recip().ln() * 2.0 / (n - 1.0)).exp_m1()).sqrt().max(1.0)
}

#[cfg(test)]
mod tests {
    use super::student_bound;

    #[test]
    fn the_bound_on_student_lies_above_its_quantiles() {
        // Two-sided quantiles of t for 4, 30 and 200 degrees of freedom, and of the normal distribution.
        for (count, chance, quantile) in
            [(4, 1e-3, 8.610), (30, 1e-3, 3.646), (30, 1e-6, 6.119), (200, 1e-6, 5.037), (1_000_000, 1e-6, 4.892)]
        {
            let bound = student_bound(count, chance);
            assert!(bound >= quantile && (count < 30 || bound < 1.4 * quantile), "{count} {chance}: {bound}");
        }
        assert_eq!(student_bound(1, 0.01), f64::INFINITY);
    }
}
