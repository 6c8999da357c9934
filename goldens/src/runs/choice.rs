//! The LM head on hidden states that are known: which logits and which greedy token a right device can have
//! (`docs/verdicts.md`, Token runs).

use half::bf16;
use ndarray::{Array2, ArrayView1, ArrayView2, Axis};
use rayon::prelude::*;
use reference::bounds::{Confidence, final_inverse_rms};
use reference::head::{final_norm, greedy, lm_head};
use reference::rounding::{round_f32, widen};
use reference::{Policy, Site};

use super::scalar::Variants;

/// Final norm and LM head of a model.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    /// Gamma of the final norm, FP32 `[H]`.
    pub gamma: ArrayView1<'a, f32>,
    /// BF16 `[vocab, H]`.
    pub weight: ArrayView2<'a, bf16>,
    /// Ids of the real vocabulary.
    pub real: usize,
    /// Of the final norm.
    pub eps: f32,
    /// How sure bounds are to hold.
    pub confidence: Confidence,
}

/// What one hidden state allows.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The reference's greedy token; `None` where a logit is NaN.
    pub token: Option<usize>,
    /// The reference's logits of the whole vocabulary, FP32.
    pub logits: Vec<f32>,
    /// Ids whose logits are bounded: those that may be among the two largest, and those asked for.
    ids: Vec<usize>,
    /// By variant of the normed row, the exact logit of each of `ids`.
    exact: Vec<Vec<f64>>,
    /// How far from it each may be computed.
    bounds: Vec<f64>,
}

impl Head<'_> {
    /// What each hidden state, a row of `hidden`, allows. `asked` names the ids that a device gave for it.
    pub fn choices(&self, hidden: ArrayView2<'_, bf16>, asked: &[Vec<usize>], policy: &Policy) -> Vec<Choice> {
        let rule = policy.at(Site::FinalNorm);
        let variants: Vec<Variants> = (0..hidden.nrows())
            .into_par_iter()
            .map(|row| {
                let x: Vec<f32> = hidden.row(row).iter().map(|&x| widen(x)).collect();
                let inv = final_inverse_rms(ArrayView1::from(&x), self.eps, self.confidence);
                Variants::new(&x, self.gamma, inv, rule)
            })
            .collect();
        // Narrowed already, so that the head's own narrowing changes nothing.
        let normed = Array2::from_shape_fn(hidden.dim(), |(row, column)| variants[row].nominal[column]);
        let logits = lm_head(normed.view(), self.weight, policy);
        // The largest norm and element of the real vocabulary's rows bound what any logit can be off by.
        let real = self.real.min(self.weight.nrows());
        let (most_squares, most) = (0..real)
            .into_par_iter()
            .map(|id| {
                let squares = self.weight.row(id).iter().map(|w| f64::from(widen(*w)).powi(2)).sum::<f64>();
                let most = self.weight.row(id).iter().fold(0f64, |most, w| most.max(f64::from(widen(*w)).abs()));
                (squares, most)
            })
            .reduce(|| (0.0, 0.0), |a, b| (a.0.max(b.0), a.1.max(b.1)));
        variants
            .par_iter()
            .enumerate()
            .map(|(row, variants)| {
                let asked = asked.get(row).map_or(&[][..], Vec::as_slice);
                self.choice(variants, logits.row(row), asked, most_squares, most)
            })
            .collect()
    }

    /// The logits of `ids` for one hidden state, in float64 from the narrowed norm.
    pub fn logits_of(&self, hidden: ArrayView1<'_, bf16>, ids: &[usize], policy: &Policy) -> Vec<f64> {
        let row = hidden.insert_axis(Axis(0));
        let normed = final_norm(row, self.gamma, self.eps, policy.freedom);
        let rule = policy.at(Site::FinalNorm);
        let terms = |id: usize| normed.iter().zip(self.weight.index_axis_move(Axis(0), id));
        let term = |(&n, &w): (&f32, &bf16)| f64::from(round_f32(n, rule)) * f64::from(widen(w));
        ids.iter().map(|&id| terms(id).map(term).sum()).collect()
    }

    fn choice(
        &self,
        variants: &Variants,
        logits: ArrayView1<'_, f32>,
        asked: &[usize],
        most_squares: f64,
        most: f64,
    ) -> Choice {
        let logits = logits.to_vec();
        let token = greedy(ArrayView1::from(&logits), self.real).ok();
        let mut choice = Choice { token, logits, ids: Vec::new(), exact: Vec::new(), bounds: Vec::new() };
        if token.is_none() {
            return choice;
        }
        let (n, real) = (&variants.nominal, self.real.min(choice.logits.len()));
        let terms = n.len();
        let largest = n.iter().fold(0f64, |largest, n| largest.max(f64::from(*n).abs()));
        let mut sorted: Vec<f32> = choice.logits[..real].to_vec();
        let second = sorted.len().saturating_sub(2);
        let second = *sorted.select_nth_unstable_by(second, f32::total_cmp).1;
        // A logit this far below the second largest is not one of the two under any permitted freedom.
        let total = choice.logits[..real].iter().fold(0f32, |total, logit| total.max(logit.abs()));
        let sum = self.confidence.sum(terms, f64::from(total), largest.powi(2) * most_squares);
        let flips: f64 = variants
            .loose
            .iter()
            .enumerate()
            .map(|(j, &i)| {
                let farthest = variants.values.iter().map(|row| (row[j] - n[i]).abs()).fold(0f32, f32::max);
                f64::from(farthest) * most
            })
            .sum();
        let slack = 2.0 * (2.0 * sum + flips);
        let near = (0..real).filter(|&id| f64::from(choice.logits[id]) >= f64::from(second) - slack);
        let mut ids: Vec<usize> = near.chain(asked.iter().copied().filter(|&id| id < choice.logits.len())).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut nominal = Vec::with_capacity(ids.len());
        for &id in &ids {
            let (mut total, mut squares) = (0f64, 0f64);
            for (&n, &w) in n.iter().zip(self.weight.row(id)) {
                let term = f64::from(n) * f64::from(widen(w));
                total += term;
                squares += term * term;
            }
            nominal.push(total);
            choice.bounds.push(self.confidence.sum(terms, total, squares));
        }
        choice.exact = variants
            .values
            .iter()
            .map(|row| {
                let moved = |id: usize| -> f64 {
                    let moves = variants.loose.iter().zip(row);
                    moves.map(|(&i, &v)| f64::from(v - n[i]) * f64::from(widen(self.weight[(id, i)]))).sum()
                };
                ids.iter().zip(&nominal).map(|(&id, total)| total + moved(id)).collect()
            })
            .collect();
        choice.ids = ids;
        choice
    }
}

impl Choice {
    /// The reference's logit of an id; `None` beyond the vocabulary.
    pub fn logit(&self, id: usize) -> Option<f32> {
        self.logits.get(id).copied()
    }

    /// How far the reference's choice is ahead of `id`; for the choice itself, of the runner-up.
    pub fn margin(&self, id: usize, real: usize) -> f64 {
        let Some(token) = self.token else { return f64::NAN };
        let best = f64::from(self.logits[token]);
        let rival = if id == token {
            self.runner_up(real).map_or(f32::NEG_INFINITY, |id| self.logits[id])
        } else {
            self.logits.get(id).copied().unwrap_or(f32::NAN)
        };
        best - f64::from(rival)
    }

    /// The largest of the real vocabulary but for the choice itself, the lowest index of equal ones.
    pub fn runner_up(&self, real: usize) -> Option<usize> {
        let others = self.logits.iter().take(real).enumerate().filter(|(id, _)| Some(*id) != self.token);
        let larger = |found: Option<(usize, f32)>, (id, &logit): (usize, &f32)| match found {
            Some((_, largest)) if logit <= largest => found,
            _ => Some((id, logit)),
        };
        others.fold(None, larger).map(|(id, _)| id)
    }

    fn index(&self, id: usize) -> Option<usize> {
        self.ids.binary_search(&id).ok()
    }

    /// How far apart permitted freedoms may bring the logits of two ids, beyond their exact difference.
    pub fn gap_bound(&self, a: usize, b: usize) -> f64 {
        let (Some(a), Some(b)) = (self.index(a), self.index(b)) else { return f64::NAN };
        let gaps = self.exact.iter().map(|row| row[a] - row[b]);
        let (low, high) = gaps.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), gap| (l.min(gap), h.max(gap)));
        (high - low) + self.bounds[a] + self.bounds[b]
    }

    /// Which of a device's logits one normed row and the bounds of their sums give, as many as possible. The second
    /// value tells which variants of the row give as many.
    pub fn reached(&self, logits: &[(usize, f32)]) -> (Vec<bool>, Vec<usize>) {
        let reaches = |row: &[f64], &(id, logit): &(usize, f32)| {
            self.index(id).is_some_and(|at| (f64::from(logit) - row[at]).abs() <= self.bounds[at])
        };
        let by_variant: Vec<Vec<bool>> =
            self.exact.iter().map(|row| logits.iter().map(|logit| reaches(row, logit)).collect()).collect();
        let count = |reached: &Vec<bool>| reached.iter().filter(|&&reached| reached).count();
        let most = by_variant.iter().map(count).max().unwrap_or(0);
        let variants: Vec<usize> = (0..by_variant.len()).filter(|&v| count(&by_variant[v]) == most).collect();
        let best = variants.first().map_or_else(|| vec![false; logits.len()], |&v| by_variant[v].clone());
        (best, variants)
    }

    /// Whether `id` can be the largest of the real vocabulary, those of `before` left out, under one of these variants.
    pub fn can_lead(&self, id: usize, before: &[usize], real: usize, variants: &[usize]) -> bool {
        let Some(at) = self.index(id) else { return false };
        let leads = |row: &Vec<f64>| {
            let rivals = self.ids.iter().enumerate().filter(|(_, other)| **other < real && !before.contains(other));
            rivals.clone().all(|(i, _)| i == at || row[i] - self.bounds[i] <= row[at] + self.bounds[at])
        };
        id < real && variants.iter().filter_map(|&v| self.exact.get(v)).any(leads)
    }

    /// Every variant of the normed row.
    pub fn variants(&self) -> Vec<usize> {
        (0..self.exact.len()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array1;
    use proptest::prelude::*;
    use reference::Freedom;

    fn real(seed: u64, index: usize) -> f32 {
        (reference::elementary::mix(seed ^ index as u64) >> 40) as f32 / 8_388_608.0 - 1.0
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn every_sampled_head_is_within_the_bounds(seed: u64, width in 16usize..400) {
            let vocab = 60;
            let hidden = Array2::from_shape_fn((2, width), |(r, c)| bf16::from_f32(3.0 * real(seed, r * width + c)));
            let gamma = Array1::from_shape_fn(width, |i| bf16::from_f32(1.0 + 0.1 * real(seed ^ 1, i)).to_f32());
            let weight = Array2::from_shape_fn((vocab, width), |(r, c)| bf16::from_f32(0.02 * real(!seed, r * width + c)));
            let head = Head {
                gamma: gamma.view(), weight: weight.view(), real: 50, eps: 1e-6, confidence: Confidence::new(0.5),
            };
            let policy = Policy::production();
            for freedom in [Freedom::Canonical, Freedom::Emulated, Freedom::Sampled { seed }] {
                let device = policy.clone().under(freedom);
                let normed = final_norm(hidden.view(), gamma.view(), 1e-6, freedom);
                let logits = lm_head(normed.view(), weight.view(), &device);
                let tokens: Vec<usize> = logits.rows().into_iter().map(|row| greedy(row, 50).unwrap()).collect();
                let asked: Vec<Vec<usize>> = tokens.iter().map(|&token| vec![token, 7]).collect();
                for (row, choice) in head.choices(hidden.view(), &asked, &policy).iter().enumerate() {
                    let pairs = [(tokens[row], logits[(row, tokens[row])]), (7, logits[(row, 7)])];
                    let (reached, variants) = choice.reached(&pairs);
                    prop_assert_eq!(reached, [true, true]);
                    prop_assert!(choice.can_lead(tokens[row], &[], 50, &variants));
                    // A logit that is off by more than rounding is not reached.
                    let wrong = [(7, logits[(row, 7)] + 1e-3)];
                    prop_assert_eq!(choice.reached(&wrong).0, [false]);
                }
            }
        }
    }
}
