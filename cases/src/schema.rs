//! The shape of the YAML files, before any rule about their values: every value keeps the place it was
//! read from, so that rules checked later can point at it.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, Visitor};
pub(crate) use serde_yaml::{Location, Spanned};

/// What decides how the rest of a case file is read. Other keys are left for later.
#[derive(Deserialize)]
pub(crate) struct Header {
    pub format: Spanned<i64>,
    pub kernel: Spanned<String>,
}

/// The keys of a file with their places; values are left for later.
pub(crate) type Keys = Entries<serde::de::IgnoredAny>;

/// `case.yaml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawCase {
    #[serde(rename = "format")]
    pub _format: i64,
    pub name: Spanned<String>,
    #[serde(rename = "kernel")]
    pub _kernel: String,
    pub geometry: Spanned<NameOr<RawSizes>>,
    pub layers: Spanned<i64>,
    pub seed: u64,
    pub max_seq: Spanned<i64>,
    pub pages: Spanned<i64>,
    pub rope_theta: Spanned<f64>,
    pub tensors: Entries<Spanned<RawRecipe>>,
    pub active_batch: Spanned<i64>,
    pub seq_lens: Option<RawRow>,
    pub block_table: RawRows,
    pub slot_mapping: Option<RawRow>,
    pub prompts: Option<RawRows>,
    pub decode_steps: Option<Spanned<i64>>,
    pub padding: Spanned<String>,
    pub policy: Option<Spanned<NameOr<RawSites>>>,
    pub poison: Option<Spanned<RawPoison>>,
    pub device: Option<RawDevice>,
    #[serde(default)]
    pub inputs_sha256: Entries<Spanned<String>>,
    #[serde(default)]
    pub final_cache_sha256: Entries<Spanned<String>>,
}

/// A value that is a name or spelled out as a mapping.
pub(crate) enum NameOr<T> {
    Name(String),
    Mapping(T),
}

/// A list of integers.
pub(crate) type RawRow = Spanned<Vec<Spanned<i64>>>;
/// Lists of integers, one a row.
pub(crate) type RawRows = Spanned<Vec<RawRow>>;

/// The sizes of `geometry:`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawSizes {
    pub hidden_size: Spanned<i64>,
    pub num_attention_heads: Spanned<i64>,
    pub num_key_value_heads: Spanned<i64>,
    pub head_dim: Spanned<i64>,
    pub intermediate_size: Spanned<i64>,
    pub num_hidden_layers: Spanned<i64>,
    pub vocab_size: Spanned<i64>,
    pub real_vocab_size: Spanned<i64>,
    pub rms_norm_eps: Option<Spanned<f64>>,
}

/// One recipe: all keys of all recipes; which of them belong is checked later.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawRecipe {
    pub recipe: Spanned<String>,
    pub mean: Option<Spanned<f64>>,
    pub std: Option<Spanned<f64>>,
    pub bf16: Option<Spanned<bool>>,
    pub lo: Option<Spanned<f64>>,
    pub hi: Option<Spanned<f64>>,
    pub value: Option<Spanned<f64>>,
    pub outlier_columns: Option<Spanned<RawOutliers>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawOutliers {
    pub period: Spanned<i64>,
    pub phase: Spanned<i64>,
    pub factor: Spanned<f64>,
}

/// A mapping from cast site to rounding rule.
pub(crate) type RawSites = Entries<Spanned<String>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawPoison {
    pub kv_beyond_context: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawDevice {
    pub kind: Spanned<String>,
    pub kernel_revision: Option<Spanned<String>>,
    pub noise: Option<RawNoise>,
    pub kernel: Option<Spanned<RawKernel>>,
}

/// `device: kernel:`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawKernel {
    pub binary: Spanned<String>,
    pub function: Spanned<String>,
    pub blocks: Spanned<i64>,
    pub arguments: Spanned<Vec<Spanned<NameOr<RawArgument>>>>,
}

/// An argument that is no tensor: all keys of all kinds; which of them belong together is checked later.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawArgument {
    pub int32: Option<Spanned<RawValue>>,
    pub uint32: Option<Spanned<RawValue>>,
    pub int64: Option<Spanned<RawValue>>,
    pub uint64: Option<Spanned<RawValue>>,
    pub float32: Option<Spanned<RawValue>>,
    pub workspace: Option<Spanned<i64>>,
    pub zero: Option<Spanned<bool>>,
}

/// A number, or a word that stands for one.
pub(crate) enum RawValue {
    Whole(i128),
    Real(f64),
    Word(String),
}

impl<'de> Deserialize<'de> for RawValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Numbers;

        impl Visitor<'_> for Numbers {
            type Value = RawValue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number")
            }

            fn visit_i64<E>(self, value: i64) -> Result<RawValue, E> {
                Ok(RawValue::Whole(value.into()))
            }

            fn visit_u64<E>(self, value: u64) -> Result<RawValue, E> {
                Ok(RawValue::Whole(value.into()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<RawValue, E> {
                Ok(RawValue::Real(value))
            }

            fn visit_str<E>(self, word: &str) -> Result<RawValue, E> {
                Ok(RawValue::Word(word.to_owned()))
            }
        }

        deserializer.deserialize_any(Numbers)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawNoise {
    pub exp_ulp: Spanned<i64>,
}

/// A suite file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RawSuite {
    pub name: Spanned<String>,
    #[serde(default)]
    pub description: String,
    pub bundles: Spanned<Vec<Spanned<String>>>,
}

/// A mapping with free keys, in file order, each key with its place.
pub(crate) struct Entries<T>(pub Vec<(Spanned<String>, T)>);

impl<T> Default for Entries<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Pairs<T> {
            type Value = Entries<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Entries(pairs))
            }
        }

        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for NameOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = NameOr<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name or a mapping")
            }

            fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
                Ok(NameOr::Name(name.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(NameOr::Mapping)
            }
        }

        deserializer.deserialize_any(Either(PhantomData))
    }
}
