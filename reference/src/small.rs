//! A small model for tests of whole steps.

use half::bf16;
use ndarray::{Array1, Array2, ArrayView1, ArrayView2, s};

use crate::elementary::mix;
use crate::geometry::Geometry;
use crate::inputs::{DownWeight, LayerWeights};
use crate::model::Weights;

/// A model of two layers whose weights are held as a checkpoint holds them.
pub struct Small {
    pub geometry: Geometry,
    codes: Vec<Array2<i8>>,
    scale: Array1<f32>,
    gamma: Array1<f32>,
    pub table: Array2<bf16>,
}

pub fn small() -> Small {
    let geometry = Geometry {
        hidden_size: 24,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 6,
        intermediate_size: 40,
        num_hidden_layers: 2,
        vocab_size: 20,
        real_vocab_size: 18,
        rms_norm_eps: 1e-6,
    };
    let code = |seed: u64| move |(r, c): (usize, usize)| mix(seed << 32 | (r * 64 + c) as u64) as i8 / 4;
    Small {
        codes: (0..2).map(|layer| Array2::from_shape_fn((40, 40), code(layer))).collect(),
        scale: Array1::from_shape_fn(40, |i| 0.004 + 0.0001 * i as f32),
        gamma: Array1::from_shape_fn(40, |i| 1.0 + 0.01 * (i % 7) as f32),
        table: Array2::from_shape_fn((20, 24), |at| bf16::from_f32(f32::from(code(9)(at)) / 16.0)),
        geometry,
    }
}

impl Weights for Small {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn layer(&self, layer: usize) -> Option<LayerWeights<'_>> {
        let codes = self.codes.get(layer)?;
        let w = |outputs: usize, inputs: usize| codes.slice(s![..outputs, ..inputs]).reversed_axes();
        let vector = |n: usize| self.scale.slice(s![..n]);
        let gamma = |n: usize| self.gamma.slice(s![..n]);
        Some(LayerWeights {
            input_rms_weight: gamma(24),
            post_rms_weight: gamma(24),
            q_norm_weight: gamma(6),
            k_norm_weight: gamma(6),
            wq: w(24, 24),
            wk: w(12, 24),
            wv: w(12, 24),
            wo: w(24, 24),
            w_gate: w(40, 24),
            w_up: w(40, 24),
            wq_scale: vector(24),
            wk_scale: vector(12),
            wv_scale: vector(12),
            wo_scale: vector(24),
            w_gate_scale: vector(40),
            w_up_scale: vector(40),
            w_down: DownWeight::Int8 { codes: w(24, 40), scale: vector(24) },
        })
    }

    fn embed_tokens(&self) -> ArrayView2<'_, bf16> {
        self.table.view()
    }

    fn final_norm(&self) -> ArrayView1<'_, f32> {
        self.gamma.slice(s![..24])
    }

    fn lm_head(&self) -> ArrayView2<'_, bf16> {
        self.table.view()
    }
}

/// Cosines and sines of 200 positions.
pub fn tables() -> [Array2<f32>; 2] {
    let angle = |(p, j): (usize, usize)| p as f32 * [1.0, 0.1, 0.01][j % 3];
    [
        Array2::from_shape_fn((200, 6), |at| libm::cosf(angle(at))),
        Array2::from_shape_fn((200, 6), |at| libm::sinf(angle(at))),
    ]
}
