//! How long work must take: the bytes it has to read and the multiply-adds it has to do, against the machine's
//! floors. Each part of the work is bound by whichever takes longer; parts follow one another.

use reference::model::{ModelError, Weights};
use reference::{Batch, DownWeight, LayerInputs, LayerWeights};

use super::Floors;

/// One part of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// Bytes that must be read once.
    pub bytes: f64,
    /// Multiply-adds that must be done.
    pub macs: f64,
    /// The arithmetic they are done in.
    pub arithmetic: Arithmetic,
}

/// Which peak multiply-adds are held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// INT8 products, INT32 sums.
    Int8,
    /// FP32 products and sums; BF16 operands are widened to it.
    Fp32,
}

/// A piece of work: parts that are done one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Work(pub Vec<Part>);

impl Work {
    /// Reading (or writing) so many bytes and nothing else.
    pub fn reading(bytes: usize) -> Self {
        Self(vec![Part { bytes: bytes as f64, macs: 0.0, arithmetic: Arithmetic::Fp32 }])
    }

    /// One decode layer of `rows` distinct rows: its seven products (`docs/numerics.md`, steps 4, 9, 11 and 13),
    /// each weight read once where it lies, and the keys and values of every active row's context read once.
    pub fn layer(inputs: &LayerInputs<'_>, rows: usize) -> Self {
        let w = &inputs.weights;
        let product = |(k, n): (usize, usize), size: usize, arithmetic| Part {
            bytes: (k * n * size) as f64,
            macs: (k * n * rows) as f64,
            arithmetic,
        };
        let int8 = [w.wq, w.wk, w.wv, w.wo, w.w_gate, w.w_up].map(|w| product(w.dim(), 1, Arithmetic::Int8));
        let size = match w.w_down {
            DownWeight::Bf16(_) => 2,
            DownWeight::Int8 { .. } => 1,
        };
        let down = product(w.w_down.dim(), size, Arithmetic::Fp32);
        let tokens: usize = inputs.batch.seq_lens.iter().take(inputs.batch.active).sum();
        // BF16 keys and values.
        let cache = Self::reading(2 * 2 * tokens * inputs.geometry.kv_width());
        Self(int8.into_iter().chain([down]).chain(cache.0).collect())
    }

    /// One decode step of a whole model: everything that it touches of the weights read once as it is held (codes,
    /// scales and norms of all layers, final norm, head, and the embedding of each active row), and the keys and
    /// values of every active row's context in all layers.
    ///
    /// # Errors
    /// The model lacks a layer.
    pub fn step(weights: &impl Weights, batch: &Batch) -> Result<Self, ModelError> {
        let geometry = weights.geometry();
        let of_layer = |layer| weights.layer(layer).map(|w| bytes(&w)).ok_or(ModelError::NoLayer(layer));
        let layers: usize = (0..geometry.num_hidden_layers).map(of_layer).sum::<Result<_, _>>()?;
        let embeddings = 2 * batch.active * geometry.hidden_size;
        let outside = 4 * weights.final_norm().len() + 2 * weights.lm_head().len() + embeddings;
        let tokens: usize = batch.seq_lens.iter().take(batch.active).sum();
        let cache = geometry.num_hidden_layers * 2 * 2 * tokens * geometry.kv_width();
        Ok(Self::reading(layers + outside + cache))
    }

    /// The least seconds it can take, and what binds: `read`, `int8`, `fp32`, or several of them with `+`.
    pub fn floor(&self, floors: &Floors) -> (String, f64) {
        let (mut seconds, mut binds) = (0.0, [("read", false), ("int8", false), ("fp32", false)]);
        for part in &self.0 {
            let (which, peak) = match part.arithmetic {
                Arithmetic::Int8 => (1, floors.int8_gmac_s),
                Arithmetic::Fp32 => (2, floors.fp32_gmac_s),
            };
            let (read, computed) = (part.bytes / (floors.read_gb_s * 1e9), part.macs / (peak * 1e9));
            seconds += read.max(computed);
            binds[if computed > read { which } else { 0 }].1 = true;
        }
        let names: Vec<_> = binds.iter().filter(|(_, binds)| *binds).map(|(name, _)| *name).collect();
        (names.join("+"), seconds)
    }
}

/// Bytes of a layer's weights as they are held.
fn bytes(w: &LayerWeights<'_>) -> usize {
    let codes = [w.wq, w.wk, w.wv, w.wo, w.w_gate, w.w_up].iter().map(|w| w.len()).sum::<usize>();
    let norms = [w.input_rms_weight, w.post_rms_weight, w.q_norm_weight, w.k_norm_weight];
    let scales = [w.wq_scale, w.wk_scale, w.wv_scale, w.wo_scale, w.w_gate_scale, w.w_up_scale];
    let vectors = norms.iter().chain(&scales).map(|vector| 4 * vector.len()).sum::<usize>();
    let down = match w.w_down {
        DownWeight::Bf16(weight) => 2 * weight.len(),
        DownWeight::Int8 { codes, scale } => codes.len() + 4 * scale.len(),
    };
    codes + vectors + down
}

#[cfg(test)]
mod tests {
    use cases::{InputStore, Inputs, NewCase, new_case};

    use super::*;

    /// 10 GB/s, 100 and 20 GMAC/s.
    const FLOORS: Floors = Floors { read_gb_s: 10.0, int8_gmac_s: 100.0, fp32_gmac_s: 20.0 };

    #[test]
    fn each_part_is_bound_by_what_takes_longer() {
        let part = |bytes, macs, arithmetic| Part { bytes, macs, arithmetic };
        // 0.1 s of reading against 0.01 s of arithmetic; 0.1 s against 0.4; 0.1 against 0.5.
        let read = part(1e9, 1e9, Arithmetic::Int8);
        let int8 = part(1e9, 40e9, Arithmetic::Int8);
        let fp32 = part(1e9, 10e9, Arithmetic::Fp32);
        let floor = |parts: &[Part]| Work(parts.to_vec()).floor(&FLOORS);
        let close = |(name, seconds): (String, f64), expected: (&str, f64)| {
            assert_eq!(name, expected.0);
            assert!((seconds - expected.1).abs() < 1e-12, "{seconds} is not {}", expected.1);
        };
        close(floor(&[read]), ("read", 0.1));
        close(floor(&[int8]), ("int8", 0.4));
        close(floor(&[fp32, read]), ("read+fp32", 0.6));
        close(floor(&[int8, fp32, read]), ("read+int8+fp32", 1.0));
        close(Work::reading(5_000_000_000).floor(&FLOORS), ("read", 0.5));
    }

    #[test]
    fn a_layer_reads_its_weights_and_contexts_once() {
        let case = new_case(NewCase {
            active_batch: 2,
            seq_lens: vec![100, 30],
            max_seq: 128,
            ..NewCase::named("layer", "mini").unwrap()
        });
        let inputs = Inputs::generate(&case.unwrap(), &InputStore::with_capacity(0)).unwrap();
        let work = Work::layer(&inputs.layer(0).unwrap(), 2);
        // mini: H = Q = 2560, KV*D = 512, I = 2048.
        let int8 = 2560.0 * (2560.0 + 512.0 + 512.0 + 2560.0 + 2048.0 + 2048.0);
        let down = 2048.0 * 2560.0;
        let cache = 130.0 * 512.0 * 4.0;
        assert_eq!(work.0.iter().map(|part| part.bytes).sum::<f64>(), int8 + 2.0 * down + cache);
        let macs =
            |arithmetic| work.0.iter().filter(|part| part.arithmetic == arithmetic).map(|part| part.macs).sum::<f64>();
        assert_eq!((macs(Arithmetic::Int8), macs(Arithmetic::Fp32)), (2.0 * int8, 2.0 * down));
    }
}
