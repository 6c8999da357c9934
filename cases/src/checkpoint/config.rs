//! `config.json` and `generation_config.json`: geometry, rotary base, stop ids, and the quantization scheme, which has
//! to be the one that the contract computes, or none where another file declares it. A key that changes what the model computes, and that the contract does
//! not know, is refused; one that does not is skipped.

use std::collections::BTreeSet;
use std::fmt::{Debug, Display};
use std::path::Path;

use reference::Geometry;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::ascend::DESCRIPTION_FILE;
use super::error::{CheckpointError, CheckpointFault, cut};
use super::layout::{Form, PROJECTIONS};
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
    /// Ids that end a generation: those of `config.json`, then those of `generation_config.json`, each once.
    pub stop_ids: Vec<usize>,
    /// Where each of them comes from.
    pub stop_sources: Vec<StopId>,
}

/// An id that ends a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopId {
    /// The id.
    pub id: usize,
    /// The files that list it: `config.json`, `generation_config.json` or both, in this order.
    pub files: Vec<&'static str>,
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
    partial_rotary_factor: Option<f64>,
    rope_parameters: Option<Map<String, Value>>,
    rope_scaling: Option<Map<String, Value>>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    hidden_act: Option<String>,
    #[serde(default)]
    use_sliding_window: bool,
    layer_types: Option<Vec<String>>,
    eos_token_id: Option<Value>,
    quantization_config: Option<Value>,
    /// What some Ascend checkpoints say of themselves.
    quantize: Option<Value>,
}

#[derive(Deserialize)]
struct GenerationJson {
    eos_token_id: Option<Value>,
}

/// Stop ids that a file may list. Models have a handful.
const MOST_IDS: usize = 1024;

/// The ids of `eos_token_id`: none, one or a list.
fn ids(value: Option<&Value>) -> Result<Vec<usize>, CheckpointFault> {
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| usize::try_from(id).ok());
        id.ok_or_else(|| holds("eos_token_id", value, "a token id or a list of them, each 0 or more"))
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() > MOST_IDS => Err(CheckpointFault::Config {
            key: "eos_token_id".to_owned(),
            found: format!("lists {} ids", list.len()),
            expected: format!("at most {MOST_IDS}"),
        }),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(one) => Ok(vec![id(one)?]),
    }
}

/// The rotary base that `rope_parameters` or `rope_scaling` gives. Everything else in them scales positions, or turns
/// a part of each head only.
fn plain_rope(key: &str, rope: &Map<String, Value>) -> Result<Option<f64>, CheckpointFault> {
    const UNSUPPORTED: &str = "scaled rotary positions are not supported";
    let mut theta = None;
    for (name, value) in rope.iter().filter(|(_, value)| !value.is_null()) {
        let key = format!("{key}.{name}");
        match name.as_str() {
            "type" | "rope_type" if value == "default" => {}
            "type" | "rope_type" => return Err(holds(&key, value, format!("\"default\": {UNSUPPORTED}"))),
            "rope_theta" => theta = Some(value.as_f64().ok_or_else(|| holds(&key, value, "a positive number"))?),
            "partial_rotary_factor" if value.as_f64() == Some(1.0) => {}
            "partial_rotary_factor" => return Err(holds(&key, value, WHOLE)),
            _ => return Err(holds(&key, value, format!("no such key: {UNSUPPORTED}"))),
        }
    }
    Ok(theta)
}

/// What `partial_rotary_factor` must be.
const WHOLE: &str = "1: rotation of a part of each head is not supported";

#[derive(Deserialize)]
struct Quantization {
    quant_method: String,
    format: String,
    config_groups: Map<String, Value>,
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
    /// Reads the configuration of the checkpoint in `dir`, which has to declare this form.
    pub fn read(dir: &Path, form: Form) -> Result<Self, CheckpointError> {
        let path = dir.join(CONFIG_FILE);
        let missing = || CheckpointError::new(&path, CheckpointFault::NoConfig);
        let config: ConfigJson = json::read(&path)?.ok_or_else(missing)?;
        let checked = |config: ConfigJson| {
            config.check(form)?;
            config.into_config()
        };
        let mut config = checked(config).map_err(|fault| CheckpointError::new(&path, fault))?;
        let path = dir.join(GENERATION_FILE);
        let more = match json::read::<GenerationJson>(&path)? {
            Some(generation) => {
                ids(generation.eos_token_id.as_ref()).map_err(|fault| CheckpointError::new(&path, fault))?
            }
            None => Vec::new(),
        };
        let first: BTreeSet<usize> = config.stop_ids.iter().copied().collect();
        let second: BTreeSet<usize> = more.iter().copied().collect();
        let mut seen = BTreeSet::new();
        config.stop_ids.extend(more);
        config.stop_ids.retain(|id| seen.insert(*id));
        let source = |&id: &usize| {
            let listed = [(CONFIG_FILE, &first), (GENERATION_FILE, &second)];
            let files = listed.into_iter().filter(|(_, ids)| ids.contains(&id)).map(|(file, _)| file).collect();
            StopId { id, files }
        };
        config.stop_sources = config.stop_ids.iter().map(source).collect();
        Ok(config)
    }
}

/// A key that holds something else than it must.
fn fault(key: &str, found: &dyn Debug, expected: impl Into<String>) -> CheckpointFault {
    holds(key, &format!("{found:?}"), expected)
}

/// The same, with the value as the file writes it.
pub(super) fn holds(key: &str, found: &dyn Display, expected: impl Into<String>) -> CheckpointFault {
    let found = format!("is {}", cut(&found.to_string(), SHOWN));
    CheckpointFault::Config { key: cut(key, SHOWN), found, expected: expected.into() }
}

/// Characters of a key or a value that a message shows.
const SHOWN: usize = 200;

/// Refuses a key that does not hold what it must.
pub(super) fn demand<T: Debug + PartialEq>(key: &str, found: &T, expected: &T) -> Result<(), CheckpointFault> {
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
    fn check(&self, form: Form) -> Result<(), CheckpointFault> {
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
        if let Some(part) = self.partial_rotary_factor.filter(|part| *part != 1.0) {
            return Err(holds("partial_rotary_factor", &part, WHOLE));
        }
        self.check_form(form)
    }

    /// Refuses a quantization other than the form's.
    fn check_form(&self, form: Form) -> Result<(), CheckpointFault> {
        let set = |value: &'_ Option<Value>| value.clone().filter(|value| !value.is_null());
        let (scheme, word) = (set(&self.quantization_config), set(&self.quantize));
        let wrong = |key: &str, found: &str, expected: String| {
            Err(CheckpointFault::Config { key: key.to_owned(), found: found.to_owned(), expected })
        };
        match (form, scheme, word) {
            (Form::HuggingFace, Some(scheme), None) => {
                Quantization::deserialize(&scheme)?.check(self.num_hidden_layers)
            }
            (Form::HuggingFace, None, _) => wrong(
                "quantization_config",
                "is missing",
                format!(
                    "a W8A8 checkpoint, whose projections are INT8: this key, or {DESCRIPTION_FILE} beside the file; \
                     `assay model quantize` makes one of a BF16 checkpoint"
                ),
            ),
            (Form::Ascend, None, None) | (Form::Unquantized, None, None) => Ok(()),
            (Form::Ascend, None, Some(word)) => demand("quantize", &word, &"w8a8_dynamic".into()),
            (Form::Ascend, Some(_), _) => wrong(
                "quantization_config",
                "is there",
                format!("none beside {DESCRIPTION_FILE}, because which of the two is meant cannot be told; remove one"),
            ),
            (Form::Unquantized, Some(_), _) => wrong(
                "quantization_config",
                "is there",
                "none: what is quantized is a checkpoint in BF16, and this one is quantized already".to_owned(),
            ),
            (Form::HuggingFace | Form::Unquantized, _, Some(word)) => {
                Err(holds("quantize", &word, format!("none without {DESCRIPTION_FILE}")))
            }
        }
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
        let mut theta = self.rope_theta;
        for (key, rope) in [("rope_parameters", &self.rope_parameters), ("rope_scaling", &self.rope_scaling)] {
            let inner = rope.as_ref().map(|rope| plain_rope(key, rope)).transpose()?.flatten();
            if let (Some(outer), Some(inner)) = (theta, inner) {
                demand(&format!("{key}.rope_theta"), &inner, &outer)?;
            }
            theta = theta.or(inner);
        }
        let expected = "a positive number, here or in rope_parameters";
        let rope_theta = match theta {
            Some(theta) if theta.is_finite() && theta > 0.0 => theta,
            Some(theta) => return Err(fault("rope_theta", &theta, expected)),
            None => {
                let (key, found) = ("rope_theta".to_owned(), "is missing".to_owned());
                return Err(CheckpointFault::Config { key, found, expected: expected.to_owned() });
            }
        };
        Ok(Config {
            geometry,
            rope_theta,
            max_positions: self.max_position_embeddings,
            tied: self.tie_word_embeddings,
            stop_ids: ids(self.eos_token_id.as_ref())?,
            stop_sources: Vec::new(),
        })
    }
}

/// The scheme that [`Quantization::check`] accepts, with every key that compressed-tensors writes.
pub fn quantization_config() -> Value {
    let scheme = |strategy: &str, dynamic: bool, observer: Option<&str>| {
        json!({
            "actorder": null, "block_structure": null, "dynamic": dynamic, "group_size": null, "num_bits": 8,
            "observer": observer, "observer_kwargs": {}, "strategy": strategy, "symmetric": true, "type": "int",
        })
    };
    json!({
        "config_groups": {
            "group_0": {
                "format": "int-quantized",
                "input_activations": scheme("token", true, None),
                "output_activations": null,
                "targets": ["Linear"],
                "weights": scheme("channel", false, Some("minmax")),
            },
        },
        "format": "int-quantized",
        "global_compression_ratio": null,
        "ignore": ["lm_head"],
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    })
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
