//! One layer of prefill: a function a step, in the order of `docs/numerics.md`, Prefill. Tensors go by the names of the
//! decode layer and have a row for each token.

use half::bf16;
use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis, Zip, s};

use super::attention::attention;
use super::{Place, Prompt};
use crate::elementary::{exp, inverse_sqrt, reciprocal};
use crate::geometry::Geometry;
use crate::inputs::{DownWeight, LayerWeights, cache_row};
use crate::kernels::{SumOrder, matmul_down, matmul_i8};
use crate::policy::{Freedom, Policy, Site};
use crate::rounding::{to_bf16, to_code, widen};
use crate::stages::{Output, Trace, row_scale};
use crate::tensor::{Tensor, TensorId as T};

/// Columns that the emulated device sums at a time under the two RMS norms.
const VECTOR_CHUNK: usize = 128;
/// Terms of the MLP's products that are summed on their own before the sums are added in order.
const K_CHUNK: usize = 128;

/// What one layer reads, besides the caches.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// Sizes.
    pub geometry: &'a Geometry,
    /// The prompts.
    pub prompts: &'a [Prompt<'a>],
    /// Where each token stands.
    pub places: &'a [Place],
    /// The layer's input and residual, BF16 `[tokens, H]`.
    pub hidden_states: ArrayView2<'a, bf16>,
    /// Weights.
    pub weights: LayerWeights<'a>,
    /// RoPE cosines, FP32 `[max_seq, D]`.
    pub rope_cos: ArrayView2<'a, f32>,
    /// RoPE sines, FP32 `[max_seq, D]`.
    pub rope_sin: ArrayView2<'a, f32>,
}

/// Runs a layer. Its K and V are written into the caches, BF16 `[pages*KV*128, D]`, before attention reads them.
/// The chunk's places must lie inside caches and tables.
#[must_use]
pub fn run_layer(
    chunk: &Chunk<'_>,
    policy: &Policy,
    k_cache: &mut ArrayViewMut2<'_, bf16>,
    v_cache: &mut ArrayViewMut2<'_, bf16>,
) -> Trace {
    let mut trace = Trace::new();
    for step in BEFORE_ATTENTION {
        step(chunk, policy, &trace).into_iter().for_each(|output| trace.record(output));
    }
    write(chunk, trace.bf16(T::KRows), k_cache);
    write(chunk, trace.bf16(T::VRows), v_cache);
    let attended = attention(chunk, policy, &trace, k_cache.view(), v_cache.view());
    trace.record(narrow(T::AttnOut, policy, Site::Attn, attended));
    for step in AFTER_ATTENTION {
        step(chunk, policy, &trace).into_iter().for_each(|output| trace.record(output));
    }
    trace
}

/// A step: it reads the tensors of earlier ones and gives its own.
type Step = fn(&Chunk<'_>, &Policy, &Trace) -> Vec<Output>;

/// The steps up to what is written into the caches.
const BEFORE_ATTENTION: [Step; 8] = [inv_rms, normed, quantize_normed, qkv, head_norms, rope_q, rope_k, write_v];

/// The steps from attention to the layer's output.
const AFTER_ATTENTION: [Step; 8] = [quantize_attn, output_projection, post_inv, mlp_in, gate_up, silu, down, out];

/// `inv_rms = 1 / sqrt(sum(x^2) * (1/H) + eps)`, `[tokens, 1]`.
fn inv_rms(chunk: &Chunk<'_>, policy: &Policy, _: &Trace) -> Vec<Output> {
    vec![plain(T::InvRmsStates, row_inverse_rms(chunk, policy, chunk.hidden_states.mapv(widen).view()))]
}

/// `normed = cast@normed((x * inv_rms) * gamma)`: the RMS is inside.
fn normed(chunk: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    let x = chunk.hidden_states.mapv(widen);
    let wide = scaled_by_gamma(x, trace.f32(T::InvRmsStates), chunk.weights.input_rms_weight);
    vec![narrow(T::NormedStates, policy, Site::Normed, wide)]
}

/// Row quantization, as in decode.
fn quantize_normed(_: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    quantize(policy, trace.widened(T::NormedStates, policy.at(Site::Normed)), Site::NormedI8, T::NormedI8, T::ActScales)
}

/// INT8 projections, column scale first. They are not multiplied by `inv_rms`.
fn qkv(chunk: &Chunk<'_>, _: &Policy, trace: &Trace) -> Vec<Output> {
    [T::QProj, T::KProj, T::VProj].into_iter().filter_map(|id| project(chunk, trace, id)).collect()
}

/// `(z * inv) * gamma` a head of q and k, with `inv = 1 / sqrt(sum(z^2) * (1/D) + eps)`; v is the projection itself.
fn head_norms(chunk: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    let norm = |id, gamma| head_norm(chunk, policy, trace.f32(id), gamma);
    vec![
        plain(T::QProjNorm, norm(T::QProj, chunk.weights.q_norm_weight)),
        plain(T::KProjNorm, norm(T::KProj, chunk.weights.k_norm_weight)),
        plain(T::VProjNorm, trace.f32(T::VProj).to_owned()),
    ]
}

/// Rotated queries, `cast@q`, `[tokens, Q]`.
fn rope_q(chunk: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    vec![narrow(T::AllQPadded, policy, Site::Q, rotate(chunk, trace.f32(T::QProjNorm)))]
}

/// Rotated keys, `cast@k_cache`, `[tokens, KV*D]`.
fn rope_k(chunk: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    vec![narrow(T::KRows, policy, Site::KCache, rotate(chunk, trace.f32(T::KProjNorm)))]
}

/// Values, `cast@v_cache`, `[tokens, KV*D]`.
fn write_v(_: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    vec![narrow(T::VRows, policy, Site::VCache, trace.f32(T::VProjNorm).to_owned())]
}

/// Row quantization of the attention's output, as in decode.
fn quantize_attn(_: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::AttnOut, policy.at(Site::Attn));
    quantize(policy, x, Site::AttnOutI8, T::AttnOutI8, T::AttnOutScales)
}

/// INT8 output projection, column scale first.
fn output_projection(chunk: &Chunk<'_>, _: &Policy, trace: &Trace) -> Vec<Output> {
    project(chunk, trace, T::AttnProjFp32).into_iter().collect()
}

/// The residual stream after attention, `proj + f32(x)`, which stays FP32 here.
fn h1(chunk: &Chunk<'_>, trace: &Trace) -> Array2<f32> {
    let mut h1 = trace.f32(T::AttnProjFp32).to_owned();
    h1.zip_mut_with(&chunk.hidden_states, |proj, x| *proj += widen(*x));
    h1
}

/// `post_inv = 1 / sqrt(sum(h1^2) * (1/H) + eps)`, `[tokens, 1]`.
fn post_inv(chunk: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    vec![plain(T::InvRmsTile, row_inverse_rms(chunk, policy, h1(chunk, trace).view()))]
}

/// `mlp_in = cast@mlp_in((h1 * post_inv) * gamma_post)`.
fn mlp_in(chunk: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    let wide = scaled_by_gamma(h1(chunk, trace), trace.f32(T::InvRmsTile), chunk.weights.post_rms_weight);
    vec![narrow(T::MlpNormIn, policy, Site::MlpIn, wide)]
}

/// Gate and up from BF16: no quantization, and weights narrowed to BF16 from their codes.
fn gate_up(chunk: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::MlpNormIn, policy.at(Site::MlpIn));
    let weights = &chunk.weights;
    let product = |codes, scale| chunked(x.view(), DownWeight::Int8 { codes, scale }, policy.freedom);
    vec![
        plain(T::GateAccAll, product(weights.w_gate, weights.w_gate_scale)),
        plain(T::UpAccAll, product(weights.w_up, weights.w_up_scale)),
    ]
}

/// `sig = 1 / (exp(-g) + 1); act = cast@silu((g * sig) * u)`: no second RMS.
fn silu(_: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    let freedom = policy.freedom;
    let mut wide = trace.f32(T::GateAccAll).to_owned();
    Zip::from(&mut wide).and(trace.f32(T::UpAccAll)).par_for_each(|g, u| {
        *g = (*g * reciprocal(exp(-*g, freedom) + 1.0, freedom)) * u;
    });
    vec![narrow(T::MlpDownTile, policy, Site::Silu, wide)]
}

/// Down projection, `[tokens, H]`.
fn down(chunk: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::MlpDownTile, policy.at(Site::Silu));
    vec![plain(T::DownAccParts, chunked(x.view(), chunk.weights.w_down, policy.freedom))]
}

/// `out = cast@out(d + h1)`: one rounding, of the FP32 `h1`.
fn out(chunk: &Chunk<'_>, policy: &Policy, trace: &Trace) -> Vec<Output> {
    vec![narrow(T::Out, policy, Site::Out, h1(chunk, trace) + trace.f32(T::DownAccParts))]
}

/// `1 / sqrt(mean of squares + eps)` of each row.
fn row_inverse_rms(chunk: &Chunk<'_>, policy: &Policy, x: ArrayView2<'_, f32>) -> Array2<f32> {
    let order = SumOrder::vector(policy.freedom, x.ncols(), VECTOR_CHUNK);
    let inverse = |row: ArrayView1<'_, f32>| inverse_rms(row, &order, chunk.geometry.rms_norm_eps, policy.freedom);
    x.map_axis(Axis(1), inverse).insert_axis(Axis(1))
}

/// `1 / sqrt(sum(x^2) * (1/n) + eps)`.
fn inverse_rms(x: ArrayView1<'_, f32>, order: &SumOrder, eps: f32, freedom: Freedom) -> f32 {
    let sum = order.sum(x.len(), |i| x[i] * x[i]);
    inverse_sqrt(sum * (1.0 / x.len() as f32) + eps, freedom)
}

/// `(x * inv[row]) * gamma[column]`.
fn scaled_by_gamma(mut x: Array2<f32>, inv: ArrayView2<'_, f32>, gamma: ArrayView1<'_, f32>) -> Array2<f32> {
    Zip::from(x.rows_mut()).and(inv.rows()).for_each(|mut x, inv| {
        x.zip_mut_with(&gamma, |x, gamma| *x = (*x * inv[0]) * gamma);
    });
    x
}

/// Head norm: the inverse RMS first, then gamma.
fn head_norm(chunk: &Chunk<'_>, policy: &Policy, z: ArrayView2<'_, f32>, gamma: ArrayView1<'_, f32>) -> Array2<f32> {
    let (dim, eps) = (chunk.geometry.head_dim, chunk.geometry.rms_norm_eps);
    let order = SumOrder::vector(policy.freedom, dim, dim);
    let mut out = z.to_owned();
    for mut head in out.exact_chunks_mut((1, dim)) {
        let mut head = head.row_mut(0);
        let inv = inverse_rms(head.view(), &order, eps, policy.freedom);
        head.zip_mut_with(&gamma, |z, gamma| *z = (*z * inv) * gamma);
    }
    out
}

/// RoPE of each head at the token's position.
fn rotate(chunk: &Chunk<'_>, x: ArrayView2<'_, f32>) -> Array2<f32> {
    let (dim, half) = (chunk.geometry.head_dim, chunk.geometry.head_dim / 2);
    let mut out = Array2::zeros(x.dim());
    for (token, place) in chunk.places.iter().enumerate() {
        let (cos, sin) = (chunk.rope_cos.row(place.position), chunk.rope_sin.row(place.position));
        for head in (0..x.ncols()).step_by(dim) {
            for j in 0..half {
                let (lo, hi) = (x[(token, head + j)], x[(token, head + half + j)]);
                out[(token, head + j)] = lo * cos[j] - hi * sin[j];
                out[(token, head + half + j)] = hi * cos[half + j] + lo * sin[half + j];
            }
        }
    }
    out
}

/// Copies each token's K or V to its cache rows.
fn write(chunk: &Chunk<'_>, rows: ArrayView2<'_, bf16>, cache: &mut ArrayViewMut2<'_, bf16>) {
    let (geometry, dim) = (chunk.geometry, chunk.geometry.head_dim);
    for (row, place) in rows.rows().into_iter().zip(chunk.places) {
        for kv_head in 0..geometry.num_key_value_heads {
            let columns = kv_head * dim..(kv_head + 1) * dim;
            cache.row_mut(cache_row(geometry, place.slot, kv_head)).assign(&row.slice(s![columns]));
        }
    }
}

/// `(f32(acc) * w_scale[n]) * act_scale[token]` with `acc` the exact INT32 sum.
fn project(chunk: &Chunk<'_>, trace: &Trace, id: T) -> Option<Output> {
    let p = chunk.weights.projection(id)?;
    let (acc, act) = (matmul_i8(trace.i8(p.codes), p.weight), trace.f32(p.scales));
    let mut out = acc.mapv(|acc| acc as f32);
    Zip::from(out.rows_mut()).and(act.rows()).par_for_each(|mut out, act| {
        out.zip_mut_with(&p.weight_scale, |acc, scale| *acc = (*acc * scale) * act[0]);
    });
    Some(plain(id, out))
}

/// `x @ w` with K in chunks of 128: each chunk's product is summed on its own, then the chunks are added in order.
fn chunked(x: ArrayView2<'_, f32>, w: DownWeight<'_>, freedom: Freedom) -> Array2<f32> {
    let mut total: Option<Array2<f32>> = None;
    for start in (0..x.ncols()).step_by(K_CHUNK) {
        let terms = start..x.ncols().min(start + K_CHUNK);
        let order = SumOrder::cube(freedom, terms.len());
        let part = matmul_down(x.slice(s![.., terms.clone()]), w.terms(terms), &order);
        match &mut total {
            None => total = Some(part),
            Some(total) => Zip::from(total).and(&part).par_for_each(|total, part| *total += part),
        }
    }
    total.unwrap_or_else(|| Array2::zeros((x.nrows(), w.dim().1)))
}

/// `i8 = clamp(rint(x * q_scale), -127, 127)` a row, and its scale (`docs/numerics.md`, step 3).
fn quantize(policy: &Policy, mut x: Array2<f32>, site: Site, codes: T, scales: T) -> Vec<Output> {
    let rule = policy.at(site);
    let mut act = Array2::zeros((x.nrows(), 1));
    Zip::from(x.rows_mut()).and(act.rows_mut()).for_each(|mut x, mut act| {
        let scale = row_scale(x.view());
        act.fill(scale.act);
        x.mapv_inplace(|x| x * scale.quant);
    });
    vec![
        Output { id: codes, tensor: Tensor::I8(x.mapv(|x| to_code(x, rule))), wide: Some(x) },
        Output { id: scales, tensor: Tensor::F32(act), wide: None },
    ]
}

/// A BF16 output with the values before its cast.
fn narrow(id: T, policy: &Policy, site: Site, wide: Array2<f32>) -> Output {
    let rule = policy.at(site);
    Output { id, tensor: Tensor::Bf16(wide.mapv(|value| to_bf16(value, rule))), wide: Some(wide) }
}

/// An FP32 output; every NaN becomes the same one.
fn plain(id: T, mut values: Array2<f32>) -> Output {
    values.par_mapv_inplace(|value| if value.is_nan() { f32::NAN } else { value });
    Output { id, tensor: Tensor::F32(values), wide: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_the_mlp_add_chunks_of_128_in_order() {
        let mix = |seed: u64, k: usize, n: usize| crate::elementary::mix(seed ^ (k * 8 + n) as u64);
        let x = Array2::from_shape_fn((2, 300), |(r, k)| widen(bf16::from_f32(mix(1, k, r) as i8 as f32 * 0.013)));
        let w = Array2::from_shape_fn((300, 5), |(k, n)| bf16::from_f32(mix(2, k, n) as i8 as f32 * 0.007));
        let product = chunked(x.view(), DownWeight::Bf16(w.view()), Freedom::Canonical);
        let mut in_one_sum = 0;
        for ((r, n), value) in product.indexed_iter() {
            let term = |k: usize| x[(r, k)] * widen(w[(k, n)]);
            let part = |from: usize, to: usize| SumOrder::Canonical.sum(to - from, |k| term(from + k));
            assert_eq!(*value, (part(0, 128) + part(128, 256)) + part(256, 300));
            in_one_sum += usize::from(*value == part(0, 300));
        }
        assert!(in_one_sum < product.len(), "the chunks must matter for this test to mean anything");
    }
}
