//! What one decode layer reads: batch metadata, weights and the paged KV cache, as views into
//! storage that somebody else owns (generated arrays, or a mapped checkpoint).

use std::ops::Range;

use half::bf16;
use ndarray::{Array2, ArrayView1, ArrayView2, CowArray, Ix2, Zip, s};

use crate::geometry::{BATCH, Geometry, PAGE};
use crate::rounding::{Rounding, to_bf16};
use crate::tensor::TensorId;

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

/// The weight of the down projection, logically BF16 `[I, H]`: `y = x @ w`.
#[derive(Clone, Copy, Debug)]
pub enum DownWeight<'a> {
    /// As the device's kernels hold it.
    Bf16(ArrayView2<'a, bf16>),
    /// As checkpoints hold it; the loader's narrowing `BF16_RNE(f32(code) * scale[out])` happens where it is read
    /// (`docs/numerics.md`, Tensors).
    Int8 {
        /// INT8 codes, `[I, H]`.
        codes: ArrayView2<'a, i8>,
        /// One scale an output channel, `[H]`.
        scale: ArrayView1<'a, f32>,
    },
}

impl DownWeight<'_> {
    /// The same weight under a shorter borrow.
    #[must_use]
    pub fn view(&self) -> DownWeight<'_> {
        match self {
            Self::Bf16(weight) => DownWeight::Bf16(weight.view()),
            Self::Int8 { codes, scale } => DownWeight::Int8 { codes: codes.view(), scale: scale.view() },
        }
    }

    /// Some rows of it: terms of the sum over K.
    #[must_use]
    pub fn terms(&self, terms: Range<usize>) -> DownWeight<'_> {
        match self {
            Self::Bf16(weight) => DownWeight::Bf16(weight.slice(s![terms, ..])),
            Self::Int8 { codes, scale } => DownWeight::Int8 { codes: codes.slice(s![terms, ..]), scale: scale.view() },
        }
    }

    /// Rows and columns, `(I, H)`.
    #[must_use]
    pub fn dim(&self) -> (usize, usize) {
        match self {
            Self::Bf16(weight) => weight.dim(),
            Self::Int8 { codes, .. } => codes.dim(),
        }
    }

    /// The BF16 values of some output columns, `[I, columns]`, each row's side by side: a view where they are held so, a
    /// copy otherwise.
    #[must_use]
    pub fn columns(&self, columns: Range<usize>) -> CowArray<'_, bf16, Ix2> {
        match self {
            Self::Bf16(weight) => {
                let columns = weight.slice(s![.., columns]);
                if columns.strides()[1] == 1 {
                    columns.into()
                } else {
                    columns.as_standard_layout().into_owned().into()
                }
            }
            Self::Int8 { codes, scale } => {
                let (codes, scale) = (codes.slice(s![.., columns.clone()]), scale.slice(s![columns]));
                let mut values = Array2::from_elem(codes.dim(), bf16::ZERO);
                Zip::from(values.rows_mut()).and(codes.rows()).for_each(|mut values, codes| {
                    Zip::from(&mut values).and(&codes).and(&scale).for_each(|value, &code, &scale| {
                        *value = to_bf16(f32::from(code) * scale, Rounding::Rne);
                    });
                });
                values.into()
            }
        }
    }
}

/// Weights of one layer, logically `[in, out]`: `y = x @ w`. Where they lie is said by their strides: the device's
/// kernels hold `[in, out]` row-major; a checkpoint holds `[out, in]`, whose transposed view is given here.
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
    pub w_down: DownWeight<'a>,
}

/// What an INT8 projection multiplies.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// The activation codes, `[16, K]`.
    pub codes: TensorId,
    /// Their scales, `[16, 1]`.
    pub scales: TensorId,
    /// INT8 `[K, N]` in either layout.
    pub weight: ArrayView2<'a, i8>,
    /// One scale an output channel, `[N]`.
    pub weight_scale: ArrayView1<'a, f32>,
}

impl<'a> LayerWeights<'a> {
    /// The projection that writes a tensor (`docs/numerics.md`, steps 4, 9 and 11); `None` for every other tensor.
    #[must_use]
    pub fn projection(&self, id: TensorId) -> Option<Projection<'a>> {
        use TensorId as T;
        let (codes, scales, weight, weight_scale) = match id {
            T::QProj => (T::NormedI8, T::ActScales, self.wq, self.wq_scale),
            T::KProj => (T::NormedI8, T::ActScales, self.wk, self.wk_scale),
            T::VProj => (T::NormedI8, T::ActScales, self.wv, self.wv_scale),
            T::AttnProjFp32 => (T::AttnOutI8, T::AttnOutScales, self.wo, self.wo_scale),
            T::GateAccAll => (T::MlpNormI8, T::MlpActScales, self.w_gate, self.w_gate_scale),
            T::UpAccAll => (T::MlpNormI8, T::MlpActScales, self.w_up, self.w_up_scale),
            _ => return None,
        };
        Some(Projection { codes, scales, weight, weight_scale })
    }
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
    /// The same inputs under a shorter borrow, so that others can take the place of some.
    #[must_use]
    pub fn view(&self) -> LayerInputs<'_> {
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
            cache: Cache { k: self.cache.k.view(), v: self.cache.v.view() },
        }
    }

    /// The same inputs over other caches.
    #[must_use]
    pub fn with_cache<'b>(&'b self, k: ArrayView2<'b, bf16>, v: ArrayView2<'b, bf16>) -> LayerInputs<'b> {
        LayerInputs { cache: Cache { k, v }, ..self.view() }
    }
}
