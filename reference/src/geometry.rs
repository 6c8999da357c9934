//! Model geometry: the sizes of a Qwen3 dense model with q/k norm, and the tiling rules of the
//! production kernels, which bind those kernels and not the reference.

use thiserror::Error;

/// Physical rows of a decode batch.
pub const BATCH: usize = 16;
/// Tokens in a KV page.
pub const PAGE: usize = 128;
/// Tokens in one online-softmax tile of decode attention.
pub const TILE: usize = 16;
/// Largest magnitude of an INT8 activation code.
pub const INT8_MAX: f32 = 127.0;
/// Smallest `amax` of a row quantization (`docs/numerics.md`, step 3).
pub const AMAX_FLOOR: f32 = 1e-4;

/// The sizes of a Qwen3 dense model.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// Hidden width `H`.
    pub hidden_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads.
    pub num_key_value_heads: usize,
    /// Width of a head, `D`.
    pub head_dim: usize,
    /// Width of the MLP, `I`.
    pub intermediate_size: usize,
    /// Layers of the model.
    pub num_hidden_layers: usize,
    /// Rows of the embedding and of the head as stored (padded).
    pub vocab_size: usize,
    /// Token ids that exist.
    pub real_vocab_size: usize,
    /// `eps` of every RMS norm.
    pub rms_norm_eps: f32,
}

/// Why a geometry cannot be computed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GeometryError {
    /// A size is zero.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A size is beyond anything a kernel is built for; it guards allocations.
    #[error("{name} is {value}, more than the {limit} this tool computes")]
    TooLarge {
        /// The size's name.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The largest value accepted.
        limit: usize,
    },
    /// RoPE needs two halves.
    #[error("head_dim is {0}; RoPE rotates two halves, so it must be even")]
    OddHead(usize),
    /// Query heads must share KV heads evenly.
    #[error("num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}")]
    Heads {
        /// Query heads.
        heads: usize,
        /// KV heads.
        kv: usize,
    },
    /// At most 16 query heads fit the rows that `all_q_padded` gives a KV head.
    #[error("{0} query heads for each KV head; all_q_padded holds at most 16")]
    Group(usize),
    /// The MLP's down projection is split in two halves of K.
    #[error("intermediate_size {0} is odd; the down projection splits it in two halves")]
    OddIntermediate(usize),
    /// The vocabulary is shorter than the ids in use.
    #[error("real_vocab_size {real} is larger than the stored vocab_size {stored}")]
    Vocab {
        /// Ids in use.
        real: usize,
        /// Rows stored.
        stored: usize,
    },
    /// `eps` must be a positive finite number.
    #[error("rms_norm_eps is {0}; it must be positive and finite")]
    Eps(String),
}

impl Geometry {
    /// Names that [`Geometry::named`] knows.
    pub const NAMES: [&'static str; 2] = ["mini", "14b"];

    /// A geometry by its short name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "14b" => Some(Self {
                hidden_size: 5120,
                num_attention_heads: 40,
                num_key_value_heads: 8,
                head_dim: 128,
                intermediate_size: 17408,
                num_hidden_layers: 40,
                vocab_size: 152_064,
                real_vocab_size: 151_936,
                rms_norm_eps: 1e-6,
            }),
            "mini" => Some(Self {
                hidden_size: 2560,
                num_attention_heads: 20,
                num_key_value_heads: 4,
                head_dim: 128,
                intermediate_size: 2048,
                num_hidden_layers: 4,
                vocab_size: 3840,
                real_vocab_size: 3800,
                rms_norm_eps: 1e-6,
            }),
            _ => None,
        }
    }

    /// Width of all query heads, `Q = num_attention_heads * head_dim`.
    #[must_use]
    pub fn q_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all KV heads, `KV * D`.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Query heads that share one KV head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// The attention scale `D^-0.5` in float32.
    #[must_use]
    pub fn attention_scale(&self) -> f32 {
        (1.0 / (self.head_dim as f64).sqrt()) as f32
    }

    /// Checks that the reference can compute this geometry.
    ///
    /// # Errors
    /// The first rule that does not hold.
    pub fn validate(&self) -> Result<(), GeometryError> {
        const LIMIT: usize = 1 << 20;
        // INT32 sums over K terms of at most 128 * 127 cannot overflow below 2^17.
        const DEPTH: usize = 1 << 17;
        for (name, value) in [
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("vocab_size", self.vocab_size),
            ("real_vocab_size", self.real_vocab_size),
        ] {
            if value == 0 {
                return Err(GeometryError::Zero(name));
            }
            if value > LIMIT {
                return Err(GeometryError::TooLarge { name, value, limit: LIMIT });
            }
        }
        for (name, value) in [("hidden_size", self.hidden_size), ("num_attention_heads * head_dim", self.q_width())] {
            if value > DEPTH {
                return Err(GeometryError::TooLarge { name, value, limit: DEPTH });
            }
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(GeometryError::OddHead(self.head_dim));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let (heads, kv) = (self.num_attention_heads, self.num_key_value_heads);
            return Err(GeometryError::Heads { heads, kv });
        }
        if self.group() > BATCH {
            return Err(GeometryError::Group(self.group()));
        }
        if !self.intermediate_size.is_multiple_of(2) {
            return Err(GeometryError::OddIntermediate(self.intermediate_size));
        }
        if self.real_vocab_size > self.vocab_size {
            let (real, stored) = (self.real_vocab_size, self.vocab_size);
            return Err(GeometryError::Vocab { real, stored });
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps.is_finite()) {
            return Err(GeometryError::Eps(self.rms_norm_eps.to_string()));
        }
        Ok(())
    }

    /// The tiling rules of the production kernels that this geometry breaks
    /// (`docs/numerics.md`, Scheduling). Empty when those kernels can run it.
    #[must_use]
    pub fn tiling_violations(&self) -> Vec<String> {
        let (h, i, kv) = (self.hidden_size, self.intermediate_size, self.kv_width());
        let rules = [
            (h.is_multiple_of(512), format!("hidden_size {h} % 512 == 0 (pairs of down tiles, projection tiles)")),
            (
                i.is_multiple_of(2) && (i / 2).is_multiple_of(64),
                format!("intermediate_size {i} / 2 % 64 == 0 (down K split)"),
            ),
            (kv.is_multiple_of(512), format!("KV width {kv} % 512 == 0 (k and v projection tiles)")),
            (
                h.is_multiple_of(20) && (h / 5).is_multiple_of(512),
                format!("hidden_size {h} % 20 == 0 and hidden_size / 5 % 512 == 0 (output projection)"),
            ),
        ];
        rules.into_iter().filter(|(holds, _)| !holds).map(|(_, rule)| rule).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_geometries_are_valid_and_fit_the_kernels() {
        for name in Geometry::NAMES {
            let geometry = Geometry::named(name).unwrap();
            assert_eq!(geometry.validate(), Ok(()), "{name}");
            assert_eq!(geometry.tiling_violations(), Vec::<String>::new(), "{name}");
        }
        assert_eq!(Geometry::named("14b").unwrap().attention_scale().to_bits(), 0.088_388_346_f32.to_bits());
    }

    #[test]
    fn impossible_geometries_are_named() {
        let mini = Geometry::named("mini").unwrap();
        let odd = Geometry { head_dim: 63, ..mini.clone() };
        assert_eq!(odd.validate(), Err(GeometryError::OddHead(63)));
        let heads = Geometry { num_attention_heads: 21, ..mini.clone() };
        assert_eq!(heads.validate(), Err(GeometryError::Heads { heads: 21, kv: 4 }));
        let group = Geometry { num_attention_heads: 17, num_key_value_heads: 1, ..mini.clone() };
        assert_eq!(group.validate(), Err(GeometryError::Group(17)));
        let zero = Geometry { hidden_size: 0, ..mini.clone() };
        assert_eq!(zero.validate(), Err(GeometryError::Zero("hidden_size")));
        let tiling = Geometry { hidden_size: 640, ..mini };
        assert_eq!(tiling.validate(), Ok(()));
        assert_eq!(tiling.tiling_violations().len(), 2);
    }
}
