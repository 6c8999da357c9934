//! What one decode layer reads: batch metadata, weights and the paged KV cache, as views into
//! storage that somebody else owns (generated arrays, or a mapped checkpoint).

use half::bf16;
use ndarray::{ArrayView1, ArrayView2};

use crate::geometry::{BATCH, Geometry, PAGE};

/// Batch metadata of one decode step. Rows from `active` on are padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Real rows, 1..=16.
    pub active: usize,
    /// Context length of each row, the token being decoded included; at least 1.
    pub seq_lens: [usize; BATCH],
    /// Page of each logical block, `[16][max_blocks]`; -1 where unused.
    pub block_table: Vec<Vec<i32>>,
    /// Slot (`page * 128 + offset`) where each row's K and V are written.
    pub slots: [usize; BATCH],
}

impl Batch {
    /// Position of the token that `row` decodes.
    #[must_use]
    pub fn position(&self, row: usize) -> usize {
        self.seq_lens[row] - 1
    }

    /// Slot of the token at `position` of `row`; `None` where the block table has no page for it.
    #[must_use]
    pub fn slot_of(&self, row: usize, position: usize) -> Option<usize> {
        let page = *self.block_table.get(row)?.get(position / PAGE)?;
        usize::try_from(page).ok().map(|page| page * PAGE + position % PAGE)
    }
}

/// Row of a cache that holds `slot` of `kv_head`: `(page*KV + kv_head)*128 + offset`.
#[must_use]
pub fn cache_row(geometry: &Geometry, slot: usize, kv_head: usize) -> usize {
    (slot / PAGE * geometry.num_key_value_heads + kv_head) * PAGE + slot % PAGE
}

/// The slot and KV head of a cache row: the inverse of [`cache_row`].
#[must_use]
pub fn cache_place(geometry: &Geometry, row: usize) -> (usize, usize) {
    let block = row / PAGE;
    let (page, kv_head) = (block / geometry.num_key_value_heads, block % geometry.num_key_value_heads);
    (page * PAGE + row % PAGE, kv_head)
}

/// The KV caches of one layer before the step, `[pages*KV*128, D]`.
#[derive(Clone, Copy, Debug)]
pub struct Cache<'a> {
    /// Keys, rotated.
    pub k: ArrayView2<'a, bf16>,
    /// Values.
    pub v: ArrayView2<'a, bf16>,
}

/// Weights of one layer in the kernel's layout, `[in, out]`: `y = x @ w`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // Each field is the kernel tensor of the same name in `docs/numerics.md`.
pub struct LayerWeights<'a> {
    pub input_rms_weight: ArrayView1<'a, f32>,
    pub post_rms_weight: ArrayView1<'a, f32>,
    pub q_norm_weight: ArrayView1<'a, f32>,
    pub k_norm_weight: ArrayView1<'a, f32>,
    pub wq: ArrayView2<'a, i8>,
    pub wk: ArrayView2<'a, i8>,
    pub wv: ArrayView2<'a, i8>,
    pub wo: ArrayView2<'a, i8>,
    pub w_gate: ArrayView2<'a, i8>,
    pub w_up: ArrayView2<'a, i8>,
    pub wq_scale: ArrayView1<'a, f32>,
    pub wk_scale: ArrayView1<'a, f32>,
    pub wv_scale: ArrayView1<'a, f32>,
    pub wo_scale: ArrayView1<'a, f32>,
    pub w_gate_scale: ArrayView1<'a, f32>,
    pub w_up_scale: ArrayView1<'a, f32>,
    pub w_down: ArrayView2<'a, bf16>,
}

/// Everything one decode layer reads.
#[derive(Clone, Copy, Debug)]
pub struct LayerInputs<'a> {
    /// Sizes.
    pub geometry: &'a Geometry,
    /// Batch metadata.
    pub batch: &'a Batch,
    /// The layer's input and residual, BF16 `[16, H]`.
    pub hidden_states: ArrayView2<'a, bf16>,
    /// Weights.
    pub weights: LayerWeights<'a>,
    /// RoPE cosines, FP32 `[max_seq, D]`.
    pub rope_cos: ArrayView2<'a, f32>,
    /// RoPE sines, FP32 `[max_seq, D]`.
    pub rope_sin: ArrayView2<'a, f32>,
    /// Caches before the step.
    pub cache: Cache<'a>,
}

impl LayerInputs<'_> {
    /// The same inputs over other caches.
    #[must_use]
    pub fn with_cache<'b>(&'b self, k: ArrayView2<'b, bf16>, v: ArrayView2<'b, bf16>) -> LayerInputs<'b> {
        let w = &self.weights;
        LayerInputs {
            geometry: self.geometry,
            batch: self.batch,
            hidden_states: self.hidden_states.view(),
            weights: LayerWeights {
                input_rms_weight: w.input_rms_weight.view(),
                post_rms_weight: w.post_rms_weight.view(),
                q_norm_weight: w.q_norm_weight.view(),
                k_norm_weight: w.k_norm_weight.view(),
                wq: w.wq.view(),
                wk: w.wk.view(),
                wv: w.wv.view(),
                wo: w.wo.view(),
                w_gate: w.w_gate.view(),
                w_up: w.w_up.view(),
                wq_scale: w.wq_scale.view(),
                wk_scale: w.wk_scale.view(),
                wv_scale: w.wv_scale.view(),
                wo_scale: w.wo_scale.view(),
                w_gate_scale: w.w_gate_scale.view(),
                w_up_scale: w.w_up_scale.view(),
                w_down: w.w_down.view(),
            },
            rope_cos: self.rope_cos.view(),
            rope_sin: self.rope_sin.view(),
            cache: Cache { k, v },
        }
    }
}
