//! What one attention head can be (`docs/verdicts.md`, Attention).
//!
//! Probabilities are narrowed inside the step and never captured. Those that lie within their bound of a
//! rounding boundary are the head's candidates: a correct device may have either neighbour, and one such
//! flip moves the whole head. A head is therefore judged by searching for the flips under which every
//! element's value reaches the device's bits, with the small bound that remains once the narrowed
//! probabilities are fixed.

use half::bf16;

use super::{Confidence, SECOND_ORDER, TINY, U, ULP, bf16_cell, narrow};
use crate::elementary::{EXP_ULPS, exp_f64};
use crate::geometry::TILE;
use crate::policy::{Policy, Site};
use crate::rounding::Rounding;

/// How many flips the search combines, and how many partial solutions it keeps.
const MAX_FLIPS: usize = 12;
const BEAM: usize = 24;

/// A probability that may be narrowed either way.
#[derive(Clone, Debug)]
struct Candidate {
    /// Index of the token within the context.
    token: usize,
    /// What the flip adds to the softmax denominator.
    denominator: f64,
    /// What the flip adds to each element's numerator.
    numerator: Vec<f64>,
}

/// One head's exact numerators and denominator, its candidates, and each element's remaining bound.
#[derive(Clone, Debug)]
pub struct HeadAnalysis {
    numerators: Vec<f64>,
    denominator: f64,
    /// Remaining bound of each element once the narrowed probabilities are fixed.
    bounds: Vec<f64>,
    candidates: Vec<Candidate>,
    rule: Rounding,
}

/// How a head compares with what it can be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadVerdict {
    /// For each element, whether it is within reach of the device's value.
    pub reached: Vec<bool>,
    /// Tokens (index within the context) whose probability is taken as narrowed the other way.
    pub flipped: Vec<usize>,
}

/// Analyses one query head over its context. `q` is `[D]`; `keys` and `values` are the tokens' rows,
/// `[D]` each, widened.
#[must_use]
pub fn analyse_head(
    q: &[f32],
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
    scale: f32,
    policy: &Policy,
    confidence: Confidence,
) -> HeadAnalysis {
    let dim = q.len();
    let prob_rule = policy.at(Site::Prob);
    let exp_error = f64::from(EXP_ULPS) * ULP;

    // Scores with their bounds.
    let scores: Vec<(f64, f64)> = keys
        .iter()
        .map(|key| {
            let (mut total, mut squares) = (0f64, 0f64);
            for (&a, &b) in q.iter().zip(key) {
                let product = f64::from(a) * f64::from(b);
                total += product;
                squares += product * product;
            }
            let score = total * f64::from(scale);
            (score, confidence.sum(dim, total, squares) * f64::from(scale) + U * score.abs())
        })
        .collect();

    // Each tile on its own: its maximum, narrowed probabilities, sum and outputs.
    struct Tile {
        max: f64,
        max_bound: f64,
        sum: f64,
        sum_bound: f64,
        out: Vec<f64>,
        out_bound: Vec<f64>,
    }
    struct Flip {
        tile: usize,
        token: usize,
        step: f64,
    }
    let mut tiles: Vec<Tile> = Vec::new();
    let mut flips: Vec<Flip> = Vec::new();
    let mut loose: Vec<(usize, usize, f64)> = Vec::new(); // tile, token, what the probability may be off by
    for (index, tile) in scores.chunks(TILE).enumerate() {
        let first = index * TILE;
        let max = tile.iter().map(|s| s.0).fold(f64::NEG_INFINITY, f64::max);
        let highest = tile.iter().map(|s| s.0 + s.1).fold(f64::NEG_INFINITY, f64::max);
        let lowest = tile.iter().map(|s| s.0 - s.1).fold(f64::NEG_INFINITY, f64::max);
        let max_bound = (highest - max).max(max - lowest);
        let mut probs = Vec::with_capacity(tile.len());
        for (offset, &(score, bound)) in tile.iter().enumerate() {
            let x = score - max;
            let p = exp_f64(x);
            let relative = if x == 0.0 && max_bound == bound {
                // The maximum itself: exp(0) is exactly 1, unless another score may overtake it.
                let rival = tile.iter().enumerate().any(|(o, s)| o != offset && s.0 + s.1 >= score - bound);
                if rival { bound + max_bound } else { 0.0 }
            } else {
                bound + max_bound + U * x.abs() + exp_error
            };
            if prob_rule == Rounding::None {
                loose.push((index, first + offset, p * relative));
                probs.push(p);
                continue;
            }
            let chosen = narrow(p, prob_rule);
            let (low, high) = (p * exp_f64(-relative) - TINY, (p * exp_f64(relative) + TINY).min(1.0));
            let (low, high) = (narrow(low.max(0.0), prob_rule), narrow(high, prob_rule));
            let (down, up) = (chosen.to_bits().abs_diff(low.to_bits()), high.to_bits().abs_diff(chosen.to_bits()));
            if down > 1 || up > 1 {
                // Scores so large that their bound spans several values: no single flip describes it.
                loose.push((index, first + offset, (high.to_f64() - low.to_f64()).abs()));
            } else {
                for other in [low, high] {
                    let step = other.to_f64() - chosen.to_f64();
                    if other != chosen && chosen.to_f64() > TINY {
                        flips.push(Flip { tile: index, token: first + offset, step });
                    }
                }
            }
            probs.push(chosen.to_f64());
        }
        let n = probs.len();
        let sum: f64 = probs.iter().sum();
        let mut out = vec![0f64; dim];
        let mut magnitude = vec![0f64; dim];
        let mut squares = vec![0f64; dim];
        for (p, value) in probs.iter().zip(&values[first..first + n]) {
            for (d, &v) in value.iter().enumerate() {
                let term = p * f64::from(v);
                out[d] += term;
                magnitude[d] += term.abs();
                squares[d] += term * term;
            }
        }
        let out_bound = (0..dim).map(|d| confidence.sum(n, out[d], squares[d])).collect();
        let prob_squares: f64 = probs.iter().map(|p| p * p).sum();
        tiles.push(Tile { max, max_bound, sum, sum_bound: confidence.sum(n, sum, prob_squares), out, out_bound });
    }

    // Combination in tile order, weights relative to the final maximum.
    let global = tiles.iter().map(|t| t.max).fold(f64::NEG_INFINITY, f64::max);
    let global_bound = tiles.iter().map(|t| t.max + t.max_bound).fold(f64::NEG_INFINITY, f64::max).max(global) - global
        + tiles.iter().filter(|t| t.max == global).map(|t| t.max_bound).fold(0.0, f64::max);
    let weights: Vec<f64> = tiles.iter().map(|t| exp_f64(t.max - global)).collect();
    let mut running_max = f64::NEG_INFINITY;
    let mut raises = Vec::with_capacity(tiles.len()); // whether the tile raised the maximum
    for tile in &tiles {
        raises.push(tile.max > running_max);
        running_max = running_max.max(tile.max);
    }
    let denominator: f64 = tiles.iter().zip(&weights).map(|(t, w)| t.sum * w).sum();
    let numerators: Vec<f64> = (0..dim).map(|d| tiles.iter().zip(&weights).map(|(t, w)| t.out[d] * w).sum()).collect();

    let mut bounds = vec![0f64; dim];
    let mut denominator_bound = 0f64;
    let mut later_raises = raises.iter().filter(|&&raised| raised).count();
    for (t, (tile, &weight)) in tiles.iter().zip(&weights).enumerate() {
        if raises[t] {
            later_raises -= 1;
        }
        // One exp when the tile enters below the maximum, one for each later raise; a tile's own weight is
        // off by the errors of the two maxima it is made of.
        let exps = later_raises + usize::from(!raises[t]);
        let off = if tiles.len() == 1 {
            0.0
        } else {
            tile.max_bound + global_bound + exps as f64 * exp_error + U * (global - tile.max)
        };
        for (d, bound) in bounds.iter_mut().enumerate() {
            let value = numerators[d] / denominator;
            *bound += weight * ((tile.out[d] - value * tile.sum).abs() * off + tile.out_bound[d]);
        }
        denominator_bound += weight * tile.sum_bound;
    }
    for &(tile, token, width) in &loose {
        for (d, bound) in bounds.iter_mut().enumerate() {
            let value = numerators[d] / denominator;
            *bound += weights[tile] * width * (f64::from(values[token][d]) - value).abs();
        }
    }
    // Three roundings a combination step, on the partial results of a fixed order.
    let lambda = confidence.lambda();
    let mut partial_sum = 0f64;
    let mut partial = vec![0f64; dim];
    let mut sum_squares = 0f64;
    let mut squares = vec![0f64; dim];
    for (tile, &weight) in tiles.iter().zip(&weights) {
        partial_sum += tile.sum * weight;
        sum_squares += 3.0 * partial_sum * partial_sum;
        for d in 0..dim {
            let term = tile.out[d] * weight;
            partial[d] += term;
            squares[d] += 3.0 * partial[d].abs().max(term.abs()).powi(2);
        }
    }
    denominator_bound += lambda * U * sum_squares.sqrt();
    for (d, bound) in bounds.iter_mut().enumerate() {
        let value = (numerators[d] / denominator).abs();
        let rounding = lambda * U * squares[d].sqrt();
        *bound = ((*bound + rounding + value * denominator_bound) / denominator + U * value) * SECOND_ORDER + TINY;
    }

    let candidates = flips
        .into_iter()
        .map(|flip| Candidate {
            token: flip.token,
            denominator: weights[flip.tile] * flip.step,
            numerator: values[flip.token].iter().map(|&v| weights[flip.tile] * flip.step * f64::from(v)).collect(),
        })
        .collect();
    HeadAnalysis { numerators, denominator, bounds, candidates, rule: policy.at(Site::Attn) }
}

impl HeadAnalysis {
    /// Probabilities that may be narrowed either way.
    #[must_use]
    pub fn candidates(&self) -> usize {
        self.candidates.len()
    }

    /// Compares a device's head, `[D]`, with what the head can be. Of all combinations of flips found
    /// the one that leaves the fewest elements out of reach is taken, the fewest flips first.
    #[must_use]
    pub fn judge(&self, device: &[bf16]) -> HeadVerdict {
        let cells: Vec<Option<(f64, f64)>> = device
            .iter()
            .zip(&self.bounds)
            .map(|(&value, bound)| bf16_cell(value, self.rule).map(|(low, high)| (low - bound, high + bound)))
            .collect();
        let start = Node {
            flips: Vec::new(),
            denominator: self.denominator,
            numerators: self.numerators.clone(),
            misses: 0,
            distance: 0.0,
        };
        let mut best = start.scored(&cells);
        let hopeless = self.hopeless(&cells);
        let mut frontier = vec![best.clone()];
        let mut fruitless = 0;
        for _ in 0..MAX_FLIPS.min(self.candidates.len()) {
            if best.misses <= hopeless || fruitless == 3 {
                break;
            }
            let mut next: Vec<Node> = Vec::new();
            for node in &frontier {
                for (index, candidate) in self.candidates.iter().enumerate() {
                    let clashes = |&i: &usize| i == index || self.candidates[i].token == candidate.token;
                    if node.flips.iter().any(clashes) {
                        continue;
                    }
                    let mut flips = node.flips.clone();
                    flips.push(index);
                    flips.sort_unstable();
                    if next.iter().any(|other| other.flips == flips) {
                        continue;
                    }
                    let numerators =
                        node.numerators.iter().zip(&candidate.numerator).map(|(n, step)| n + step).collect();
                    let denominator = node.denominator + candidate.denominator;
                    next.push(Node { flips, denominator, numerators, misses: 0, distance: 0.0 }.scored(&cells));
                }
            }
            next.sort_by(|a, b| a.misses.cmp(&b.misses).then(a.distance.total_cmp(&b.distance)));
            next.truncate(BEAM);
            match next.first() {
                Some(first) if first.misses < best.misses => (best, fruitless) = (first.clone(), 0),
                Some(_) => fruitless += 1,
                None => break,
            }
            frontier = next;
        }
        let reached = best.reached(&cells);
        HeadVerdict { reached, flipped: best.flips.iter().map(|&i| self.candidates[i].token).collect() }
    }
}

impl HeadAnalysis {
    /// Elements that no combination of flips can bring within reach: further away than all flips
    /// together could move them.
    fn hopeless(&self, cells: &[Option<(f64, f64)>]) -> usize {
        let slack: f64 = self.candidates.iter().map(|c| c.denominator.abs()).sum();
        let smallest = self.denominator - slack;
        let out_of_reach = |d: usize| {
            let Some((low, high)) = cells[d] else { return true };
            let value = self.numerators[d] / self.denominator;
            let moves: f64 =
                self.candidates.iter().map(|c| (c.numerator[d] - value * c.denominator).abs()).sum::<f64>();
            let gap = (low - value).max(value - high);
            gap.is_nan() || gap > moves / smallest.max(f64::MIN_POSITIVE)
        };
        (0..cells.len()).filter(|&d| out_of_reach(d)).count()
    }
}

/// A set of flips and how far it is from the device's head.
#[derive(Clone, Debug)]
struct Node {
    flips: Vec<usize>,
    denominator: f64,
    numerators: Vec<f64>,
    misses: usize,
    distance: f64,
}

impl Node {
    fn scored(mut self, cells: &[Option<(f64, f64)>]) -> Self {
        for (numerator, cell) in self.numerators.iter().zip(cells) {
            let value = numerator / self.denominator;
            let Some((low, high)) = *cell else {
                self.misses += 1;
                continue;
            };
            let gap = (low - value).max(value - high);
            if gap > 0.0 || gap.is_nan() {
                self.misses += 1;
                // In units of the cell, so that no element dominates.
                self.distance += (gap / (high - low)).min(1e3);
            }
        }
        self
    }

    fn reached(&self, cells: &[Option<(f64, f64)>]) -> Vec<bool> {
        self.numerators
            .iter()
            .zip(cells)
            .map(|(numerator, cell)| {
                let value = numerator / self.denominator;
                cell.is_some_and(|(low, high)| low <= value && value <= high)
            })
            .collect()
    }
}
