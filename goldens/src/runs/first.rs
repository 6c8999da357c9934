//! Cache rows of the first layer. Its input is the embedding of a known token, so that what it writes is known up to one
//! scalar a row and one a head: they are judged strictly (`docs/verdicts.md`, Token runs).

use half::bf16;
use ndarray::{Array2, ArrayView1, ArrayView2, s};
use rayon::prelude::*;
use reference::bounds::{self, Bounded, Confidence, U};
use reference::kernels::matmul_i8;
use reference::rounding::{is_bf16_tie, round_f32, to_bf16, to_code, widen};
use reference::stages::row_scale;
use reference::{Geometry, LayerWeights, Policy, Rounding, Site};

use super::scalar::{Variants, under_one_factor};

/// What the first layer is made of.
#[derive(Clone, Copy)]
pub struct First<'a> {
    /// Sizes.
    pub geometry: &'a Geometry,
    /// Its weights.
    pub weights: LayerWeights<'a>,
    /// Embeddings, BF16 `[vocab, H]`.
    pub embed: ArrayView2<'a, bf16>,
    /// RoPE cosines, FP32 `[max_seq, D]`.
    pub cos: ArrayView2<'a, f32>,
    /// RoPE sines.
    pub sin: ArrayView2<'a, f32>,
    /// How sure bounds are to hold.
    pub confidence: Confidence,
}

/// One place whose rows are looked at.
#[derive(Clone, Copy)]
pub struct Fed<'d> {
    /// The token.
    pub token: usize,
    /// Its position.
    pub position: usize,
    /// Whether a decode step computes it; otherwise the prefill does.
    pub decode: bool,
    /// What the device's K holds there, `[KV*D]`, where K was captured.
    pub k: Option<ArrayView1<'d, bf16>>,
    /// What its V holds.
    pub v: Option<ArrayView1<'d, bf16>>,
}

/// What a place's rows are, against what they should be.
#[derive(Clone, Debug)]
pub struct Written {
    /// K of the exact scalars, `[KV*D]`.
    pub k: Vec<bf16>,
    /// V of the exact scalars.
    pub v: Vec<bf16>,
    /// Elements of the device's K that permitted scalars give; all of them where K was not captured.
    pub k_reached: Vec<bool>,
    /// Elements of its V that they give.
    pub v_reached: Vec<bool>,
    /// Exact ties of `normed` in the row whose two results differ.
    pub ties: u64,
}

impl Written {
    /// Elements that nothing permitted gives.
    pub fn unreached(&self) -> usize {
        self.k_reached.iter().chain(&self.v_reached).filter(|&&reached| !reached).count()
    }
}

/// Projected values of one row, and the scalar that is still to be multiplied in.
struct Projected {
    k: Vec<f32>,
    v: Vec<f32>,
    inv: Bounded,
}

impl First<'_> {
    /// Judges places under a policy's rules. Tokens must have an embedding.
    pub fn judge(&self, fed: &[Fed<'_>], policy: &Policy) -> Vec<Written> {
        // One row a place, computed with the exact scalar.
        let inputs: Vec<Input> = fed.par_iter().map(|fed| self.input(fed, policy)).collect();
        let rows: Vec<&[f32]> = inputs.iter().map(|input| input.nominal()).collect();
        let projected = self.project(&rows, policy);
        let judged: Vec<Written> = fed
            .par_iter()
            .zip(&inputs)
            .zip(projected)
            .map(|((fed, input), (k, v))| {
                let inv = if fed.decode { input.inv } else { Bounded { value: 1.0, bound: 0.0 } };
                Written { ties: input.ties, ..self.written(fed, &Projected { k, v, inv }, policy) }
            })
            .collect();
        // Where the prefill's normed row may be another one, that is tried too.
        judged
            .into_iter()
            .zip(fed)
            .zip(&inputs)
            .map(|((nominal, fed), input)| match &input.normed {
                Normed::Scaled(variants) if nominal.unreached() > 0 => {
                    self.best_variant(fed, variants, policy, nominal)
                }
                _ => nominal,
            })
            .collect()
    }

    fn best_variant(&self, fed: &Fed<'_>, variants: &Variants, policy: &Policy, nominal: Written) -> Written {
        let rows: Vec<Vec<f32>> = (1..variants.values.len()).map(|variant| variants.row(variant)).collect();
        let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let mut best = nominal;
        for (k, v) in self.project(&rows, policy) {
            let written = self.written(fed, &Projected { k, v, inv: Bounded { value: 1.0, bound: 0.0 } }, policy);
            if written.unreached() < best.unreached() {
                // Shown is what the exact scalar gives.
                best = Written { k_reached: written.k_reached, v_reached: written.v_reached, ..best };
            }
            if best.unreached() == 0 {
                break;
            }
        }
        best
    }

    fn input(&self, fed: &Fed<'_>, policy: &Policy) -> Input {
        let x: Vec<f32> = self.embed.row(fed.token).iter().map(|&x| widen(x)).collect();
        let inv = bounds::inverse_rms(ArrayView1::from(&x), self.geometry.rms_norm_eps, true, self.confidence);
        let gamma = self.weights.input_rms_weight;
        let rule = policy.at(Site::Normed);
        if !fed.decode {
            return Input { normed: Normed::Scaled(Variants::new(&x, gamma, inv, rule)), inv, ties: 0 };
        }
        let wide: Vec<f32> = x.iter().zip(gamma).map(|(x, gamma)| x * gamma).collect();
        let telling = |&&x: &&f32| is_bf16_tie(x) && to_bf16(x, Rounding::Rne) != to_bf16(x, Rounding::TiesAway);
        let ties = wide.iter().filter(telling).count() as u64;
        Input { normed: Normed::Plain(wide.iter().map(|&x| round_f32(x, rule)).collect()), inv, ties }
    }

    /// Row quantization and the two projections (steps 3 and 4), FP32 `[KV*D]` each.
    fn project(&self, rows: &[&[f32]], policy: &Policy) -> Vec<(Vec<f32>, Vec<f32>)> {
        let scales: Vec<_> = rows.iter().map(|row| row_scale(ArrayView1::from(*row))).collect();
        let rule = policy.at(Site::NormedI8);
        let codes = Array2::from_shape_fn((rows.len(), self.geometry.hidden_size), |(row, column)| {
            to_code(rows[row][column] * scales[row].quant, rule)
        });
        let project = |weight: ArrayView2<'_, i8>, scale: ArrayView1<'_, f32>| -> Vec<Vec<f32>> {
            let sums = matmul_i8(codes.view(), weight);
            let rows = sums.rows().into_iter().zip(&scales);
            rows.map(|(sums, row)| sums.iter().zip(scale).map(|(&sum, w)| (sum as f32 * w) * row.act).collect())
                .collect()
        };
        let w = &self.weights;
        project(w.wk, w.wk_scale).into_iter().zip(project(w.wv, w.wv_scale)).collect()
    }

    /// Steps 5 and 6 against the device's rows.
    fn written(&self, fed: &Fed<'_>, row: &Projected, policy: &Policy) -> Written {
        let dim = self.geometry.head_dim;
        let inv = row.inv.value;
        let v: Vec<f64> = row.v.iter().map(|&v| f64::from(v) * inv).collect();
        let slack: Vec<f64> = v.iter().map(|v| v.abs() * U).collect();
        let rule = policy.at(Site::VCache);
        let reach = row.inv.bound / row.inv.value;
        let mut written = Written {
            k: Vec::with_capacity(row.k.len()),
            v: v.iter().map(|&v| to_bf16(v as f32, rule)).collect(),
            k_reached: Vec::with_capacity(row.k.len()),
            v_reached: match fed.v {
                Some(device) => under_one_factor(&v, &slack, &device.to_vec(), reach, rule),
                None => vec![true; v.len()],
            },
            ties: 0,
        };
        let rule = policy.at(Site::KCache);
        for (head, projected) in row.k.chunks_exact(dim).enumerate() {
            let z: Vec<f32> = projected.iter().map(|&k| (f64::from(k) * inv) as f32).collect();
            let head_inv =
                bounds::inverse_rms(ArrayView1::from(&z), self.geometry.rms_norm_eps, false, self.confidence);
            let normed: Vec<f64> = projected
                .iter()
                .zip(self.weights.k_norm_weight)
                .map(|(&k, &gamma)| f64::from(k) * inv * f64::from(gamma) * head_inv.value)
                .collect();
            let (values, slack) = self.rotated(&normed, fed.position);
            // What the row's own scalar is off by, the head's makes up for but where eps counts.
            let reach = reach + head_inv.bound / head_inv.value;
            match fed.k {
                Some(device) => {
                    let device: Vec<bf16> = device.slice(s![head * dim..(head + 1) * dim]).to_vec();
                    written.k_reached.extend(under_one_factor(&values, &slack, &device, reach, rule));
                }
                None => written.k_reached.extend(std::iter::repeat_n(true, dim)),
            }
            written.k.extend(values.iter().map(|&k| to_bf16(k as f32, rule)));
        }
        written
    }

    /// RoPE of one head in float64, and what FP32 roundings may move each element by: three on the way here, one of
    /// each product, one of the sum, each of it and of the sum's terms.
    fn rotated(&self, x: &[f64], position: usize) -> (Vec<f64>, Vec<f64>) {
        let (cos, sin) = (self.cos.row(position), self.sin.row(position));
        let half = x.len() / 2;
        let mut values = vec![0.0; x.len()];
        let mut slack = vec![0.0; x.len()];
        for j in 0..x.len() {
            let (with, sign) = if j < half { (j + half, -1.0) } else { (j - half, 1.0) };
            let (own, other) = (x[j] * f64::from(cos[j]), sign * x[with] * f64::from(sin[j]));
            values[j] = own + other;
            slack[j] = (own.abs() + other.abs()) * 5.0 * U * (1.0 + 1e-3) + f64::from(f32::MIN_POSITIVE);
        }
        (values, slack)
    }

    /// The position whose rotation gives a place's keys, when it is another one.
    pub fn position_of(&self, fed: &Fed<'_>, policy: &Policy) -> Option<usize> {
        let positions: Vec<usize> = (0..self.cos.nrows()).filter(|&position| position != fed.position).collect();
        let at: Vec<Fed<'_>> = positions.iter().map(|&position| Fed { position, ..*fed }).collect();
        let judged = self.judge(&at, policy);
        positions.into_iter().zip(judged).find(|(_, written)| written.unreached() == 0).map(|(position, _)| position)
    }
}

/// The first layer's normed row of a place.
struct Input {
    normed: Normed,
    inv: Bounded,
    ties: u64,
}

enum Normed {
    /// Decode: the scalar is multiplied in behind the projections.
    Plain(Vec<f32>),
    /// Prefill: the scalar is in it.
    Scaled(Variants),
}

impl Input {
    fn nominal(&self) -> &[f32] {
        match &self.normed {
            Normed::Plain(row) => row,
            Normed::Scaled(variants) => &variants.nominal,
        }
    }
}
