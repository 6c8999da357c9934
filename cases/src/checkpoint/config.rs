//! `config.json` and `generation_config.json`: geometry, rotary base, stop ids, and the quantization scheme, which has
//! to be the one that the contract computes. A key that changes what the model computes, and that the contract does
//! not know, is refused; one that does not is skipped.

use std::fmt::Debug;
use std::path::Path;

use reference::Geometry;
use serde::Deserialize;
use serde_json::Value;

use super::error::{CheckpointError, CheckpointFault};
use super::layout::PROJECTIONS;
use super::{CONFIG_FILE, GENERATION_FILE, json};

/// What the configuration files say, as far as it is needed.
#[derive(Clone, Debug)]
pub struct Config {
    /// Sizes.
    pub geometry: Geometry,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Longest context that the model was made for, where it is said.
    pub max_positions: Option<usize>,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Ids that end a generation: those of `config.json`, then those of `generation_config.json`.
    pub stop_ids: Vec<usize>,
}

#[derive(Deserialize)]
struct ConfigJson {
    architectures: Option<Vec<String>>,
    model_type: String,
    hidden_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    vocab_size: usize,
    rms_norm_eps: f64,
    max_position_embeddings: Option<usize>,
    rope_theta: Option<f64>,
    rope_parameters: Option<Rope>,
    rope_scaling: Option<Rope>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    hidden_act: Option<String>,
    #[serde(default)]
    use_sliding_window: bool,
    layer_types: Option<Vec<String>>,
    eos_token_id: Option<Ids>,
    quantization_config: Option<Quantization>,
}

#[derive(Deserialize)]
struct Rope {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
}

#[derive(Deserialize)]
struct GenerationJson {
    eos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(usize),
    Many(Vec<usize>),
}

impl Ids {
    fn into_vec(self) -> Vec<usize> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

#[derive(Deserialize)]
struct Quantization {
    quant_method: String,
    format: String,
    config_groups: serde_json::Map<String, Value>,
    #[serde(default)]
    ignore: Vec<String>,
    kv_cache_scheme: Option<Value>,
    sparsity_config: Option<Value>,
    transform_config: Option<Value>,
}

#[derive(Deserialize)]
struct Group {
    format: Option<String>,
    targets: Vec<String>,
    weights: Option<Scheme>,
    input_activations: Option<Scheme>,
    output_activations: Option<Value>,
}

#[derive(Deserialize)]
struct Scheme {
    num_bits: u32,
    r#type: String,
    symmetric: bool,
    strategy: String,
    dynamic: Value,
    group_size: Option<Value>,
}

impl Scheme {
    /// Everything that counts, in words.
    fn told(&self) -> String {
        let Self { num_bits, r#type, symmetric, strategy, dynamic, group_size } = self;
        let group = group_size.as_ref().map(|size| format!(", groups of {size}")).unwrap_or_default();
        format!("{num_bits} bits, type {type}, symmetric {symmetric}, strategy {strategy}, dynamic {dynamic}{group}")
    }
}

impl Config {
    /// Reads the configuration of the checkpoint in `dir`.
    pub fn read(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(CONFIG_FILE);
        let missing = || CheckpointError::new(&path, std::io::Error::from(std::io::ErrorKind::NotFound));
        let config: ConfigJson = json::read(&path)?.ok_or_else(missing)?;
        let checked = |config: ConfigJson| {
            config.check()?;
            config.into_config()
        };
        let mut config = checked(config).map_err(|fault| CheckpointError::new(&path, fault))?;
        if let Some(generation) = json::read::<GenerationJson>(&dir.join(GENERATION_FILE))? {
            for id in generation.eos_token_id.map(Ids::into_vec).unwrap_or_default() {
                if !config.stop_ids.contains(&id) {
                    config.stop_ids.push(id);
                }
            }
        }
        Ok(config)
    }
}

/// A key that holds something else than it must.
fn fault(key: &str, found: &dyn Debug, expected: impl Into<String>) -> CheckpointFault {
    CheckpointFault::Config { key: key.to_owned(), found: format!("is {found:?}"), expected: expected.into() }
}

/// Refuses a key that does not hold what it must.
fn demand<T: Debug + PartialEq>(key: &str, found: &T, expected: &T) -> Result<(), CheckpointFault> {
    if found == expected { Ok(()) } else { Err(fault(key, found, format!("{expected:?}"))) }
}

/// Refuses a key that holds anything but nothing.
fn demand_empty(key: &str, value: Option<&Value>) -> Result<(), CheckpointFault> {
    match value {
        None | Some(Value::Null) => Ok(()),
        Some(Value::Object(map)) if map.is_empty() => Ok(()),
        Some(other) => Err(fault(key, other, "nothing: the contract has no such step")),
    }
}

impl ConfigJson {
    /// Refuses what the contract does not compute.
    fn check(&self) -> Result<(), CheckpointFault> {
        demand("model_type", &self.model_type, &"qwen3".to_owned())?;
        if let Some(names) = &self.architectures {
            demand("architectures", names, &vec!["Qwen3ForCausalLM".to_owned()])?;
        }
        if let Some(name) = &self.hidden_act {
            demand("hidden_act", name, &"silu".to_owned())?;
        }
        demand("attention_bias", &self.attention_bias, &false)?;
        demand("use_sliding_window", &self.use_sliding_window, &false)?;
        for (index, kind) in self.layer_types.iter().flatten().enumerate() {
            demand(&format!("layer_types[{index}]"), kind, &"full_attention".to_owned())?;
        }
        if let Some(types) = &self.layer_types {
            demand("length of layer_types", &types.len(), &self.num_hidden_layers)?;
        }
        for (key, rope) in [("rope_parameters", &self.rope_parameters), ("rope_scaling", &self.rope_scaling)] {
            if let Some(kind) = rope.as_ref().and_then(|rope| rope.rope_type.as_ref()) {
                demand(&format!("{key}.rope_type"), kind, &"default".to_owned())?;
            }
        }
        let scheme = self.quantization_config.as_ref();
        let none = || CheckpointFault::Config {
            key: "quantization_config".to_owned(),
            found: "is missing".to_owned(),
            expected: "a W8A8 checkpoint, whose projections are INT8".to_owned(),
        };
        scheme.ok_or_else(none)?.check(self.num_hidden_layers)
    }

    fn into_config(self) -> Result<Config, CheckpointFault> {
        let geometry = Geometry {
            hidden_size: self.hidden_size,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            vocab_size: self.vocab_size,
            real_vocab_size: self.vocab_size,
            rms_norm_eps: self.rms_norm_eps as f32,
        };
        geometry.validate()?;
        let inner = self.rope_parameters.and_then(|rope| rope.rope_theta);
        if let (Some(outer), Some(inner)) = (self.rope_theta, inner) {
            demand("rope_parameters.rope_theta", &inner, &outer)?;
        }
        let theta = self.rope_theta.or(inner);
        let rope_theta = theta.filter(|theta| theta.is_finite() && *theta > 0.0);
        let wrong = || fault("rope_theta", &theta, "a positive number, here or in rope_parameters");
        Ok(Config {
            geometry,
            rope_theta: rope_theta.ok_or_else(wrong)?,
            max_positions: self.max_position_embeddings,
            tied: self.tie_word_embeddings,
            stop_ids: self.eos_token_id.map(Ids::into_vec).unwrap_or_default(),
        })
    }
}

impl Quantization {
    /// Refuses every scheme but W8A8 as the contract computes it.
    fn check(&self, layers: usize) -> Result<(), CheckpointFault> {
        let key = |name: &str| format!("quantization_config.{name}");
        demand(&key("quant_method"), &self.quant_method, &"compressed-tensors".to_owned())?;
        demand(&key("format"), &self.format, &"int-quantized".to_owned())?;
        demand_empty(&key("kv_cache_scheme"), self.kv_cache_scheme.as_ref())?;
        let dense = |config: &Value| config.get("format").is_some_and(|format| format == "dense");
        demand_empty(&key("sparsity_config"), self.sparsity_config.as_ref().filter(|config| !dense(config)))?;
        demand_empty(&key("transform_config"), self.transform_config.as_ref())?;
        demand(&key("config_groups: their number"), &self.config_groups.len(), &1)?;
        for (name, group) in &self.config_groups {
            let key = |part: &str| key(&format!("config_groups.{name}.{part}"));
            let group = Group::deserialize(group)?;
            if let Some(format) = &group.format {
                demand(&key("format"), format, &"int-quantized".to_owned())?;
            }
            demand(&key("targets"), &group.targets, &vec!["Linear".to_owned()])?;
            for (part, scheme, expected) in [
                ("weights", &group.weights, "8 bits, type int, symmetric true, strategy channel, dynamic false"),
                (
                    "input_activations",
                    &group.input_activations,
                    "8 bits, type int, symmetric true, strategy token, dynamic true",
                ),
            ] {
                let told = scheme.as_ref().map_or_else(|| "missing".to_owned(), Scheme::told);
                demand(&key(part), &told, &expected.to_owned())?;
            }
            demand_empty(&key("output_activations"), group.output_activations.as_ref())?;
        }
        let is_head = |entry: &str| match entry.strip_prefix("re:") {
            Some(pattern) => pattern.trim_matches(['^', '$', '.', '*', '\\']) == "lm_head",
            None => entry == "lm_head",
        };
        let harmless = ["model.embed_tokens", "model.norm"];
        let other = self.ignore.iter().find(|entry| !is_head(entry) && !harmless.contains(&entry.as_str()));
        if let Some(entry) = other {
            let projection = (0..layers).any(|layer| {
                let prefix = format!("model.layers.{layer}.");
                entry.strip_prefix(&prefix).is_some_and(|module| PROJECTIONS.contains(&module))
            });
            let expected = if projection { "every projection of the layers to be INT8" } else { "`lm_head` alone" };
            return Err(fault(&key("ignore"), entry, expected));
        }
        if !self.ignore.iter().any(|entry| is_head(entry)) {
            return Err(fault(&key("ignore"), &self.ignore, "`lm_head` in it: the head is BF16"));
        }
        Ok(())
    }
}
