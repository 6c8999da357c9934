//! Causal online softmax of prefill, page by page over the cache, which holds this call's K and V already.

use half::bf16;
use ndarray::{Array2, ArrayView2};
use rayon::prelude::*;

use super::layer::Chunk;
use super::rows_of;
use crate::geometry::PAGE;
use crate::kernels::Block;
use crate::policy::{Policy, Site};
use crate::softmax::Softmax;
use crate::stages::Trace;
use crate::tensor::TensorId as T;

/// Rows of a cache, `D` values each.
type Rows<'a> = Vec<&'a [bf16]>;

/// Attention before its cast, FP32 `[tokens, Q]`. Tiles are pages of 128 tokens; the token at position `p` sees `p + 1`
/// tokens of its prompt. The caches are BF16 `[pages*KV*128, D]`.
pub fn attention(
    chunk: &Chunk<'_>,
    policy: &Policy,
    trace: &Trace,
    k: ArrayView2<'_, bf16>,
    v: ArrayView2<'_, bf16>,
) -> Array2<f32> {
    let (geometry, heads) = (chunk.geometry, chunk.geometry.num_key_value_heads);
    let width = geometry.group() * geometry.head_dim;
    let mut out = Array2::zeros((chunk.places.len(), heads * width));
    let (k, v) = (k.as_standard_layout(), v.as_standard_layout());
    let (Some(k), Some(v)) = (Block::new(k.view()), Block::new(v.view())) else { return out };
    // The cache rows of each prompt and KV head, once for all of the prompt's tokens.
    let length = |prompt: usize| chunk.prompts.get(prompt).map_or(0, |prompt| prompt.start + prompt.tokens.len());
    let of = |(prompt, kv_head): (usize, usize)| {
        let rows = rows_of(geometry, &chunk.prompts[prompt], length(prompt), kv_head);
        rows.iter().map(|&row| (k.row(row), v.row(row))).unzip()
    };
    let cached: Vec<(Rows<'_>, Rows<'_>)> =
        (0..chunk.prompts.len()).flat_map(|prompt| (0..heads).map(move |head| (prompt, head))).map(of).collect();
    let queries = trace.widened(T::AllQPadded, policy.at(Site::Q));
    let queries = queries.as_slice().unwrap_or_default();
    let softmax =
        Softmax { tile: PAGE, scale: geometry.attention_scale(), prob: policy.at(Site::Prob), freedom: policy.freedom };
    if let Some(out) = out.as_slice_mut() {
        out.par_chunks_exact_mut(width).enumerate().for_each(|(index, out)| {
            let (place, kv_head) = (chunk.places[index / heads], index % heads);
            let (keys, values) = &cached[place.prompt * heads + kv_head];
            let seen = place.position + 1;
            softmax.attend(&queries[index * width..(index + 1) * width], &keys[..seen], &values[..seen], &[], out);
        });
    }
    out
}
