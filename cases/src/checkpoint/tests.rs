//! Checkpoints made by [`synthesize`](super::synthesize()) and then changed in one place each: what is read, and what is
//! refused under which name.

use std::collections::BTreeMap;
use std::fs;

use reference::{DType, Tensor};
use tempfile::TempDir;

use super::*;
use crate::header::{Entry, Header};
use crate::seeded;
use crate::{Recipe, RecipeKind};

mod ascend_form;
mod fingerprints;
mod quantized;

fn small() -> Geometry {
    Geometry {
        hidden_size: 64,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        intermediate_size: 96,
        num_hidden_layers: 2,
        vocab_size: 50,
        real_vocab_size: 50,
        rms_norm_eps: 1e-6,
    }
}

fn synthesized(geometry: Geometry, seed: u64) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    synthesize(dir.path(), &Synthesis { geometry, seed, replace: false }, &mut |_, _| ()).unwrap();
    dir
}

/// Every file under a directory and its bytes; directories have none.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    paths.map(|path| (path.clone(), fs::read(&path).unwrap_or_default())).collect()
}

#[test]
fn a_refused_synthesis_leaves_everything_as_it_was() {
    let dir = synthesized(small(), 1);
    let before = contents(dir.path());
    // More than any disk holds, and refused before it is planned tensor by tensor.
    let geometry = Geometry { num_hidden_layers: 1 << 20, ..Geometry::named("14b").unwrap() };
    let huge = |replace| Synthesis { geometry: geometry.clone(), seed: 1, replace };
    let refused = synthesize(dir.path(), &huge(true), &mut |_, _| ()).unwrap_err().to_string();
    assert!(refused.contains("MB free") && refused.contains("stays until the new one is whole"), "{refused}");
    assert_eq!(contents(dir.path()), before);
    // What an interrupted run left is not touched by a refused one either.
    fs::create_dir(dir.path().join(".assay-x.tmp")).unwrap();
    fs::write(dir.path().join(".assay-y.tmp"), "y").unwrap();
    let before = contents(dir.path());
    synthesize(dir.path(), &huge(true), &mut |_, _| ()).unwrap_err();
    assert_eq!(contents(dir.path()), before);
    // No directory stays that was made for nothing.
    let new = dir.path().join("a/b");
    synthesize(&new, &huge(false), &mut |_, _| ()).unwrap_err();
    assert_eq!(contents(dir.path()), before);
    // One that was there does.
    fs::create_dir(dir.path().join("a")).unwrap();
    synthesize(&new, &huge(false), &mut |_, _| ()).unwrap_err();
    assert!(dir.path().join("a").is_dir() && !new.exists());
}

#[test]
fn the_old_checkpoint_stays_until_the_new_one_is_whole() {
    let dir = synthesized(small(), 1);
    let old = Checkpoint::open(dir.path()).unwrap().layer(0).unwrap().wq.to_owned();
    fs::write(dir.path().join("notes.txt"), "mine").unwrap();
    fs::create_dir(dir.path().join(".assay-x.tmp")).unwrap();
    let again = Synthesis { geometry: small(), seed: 2, replace: true };
    let mut calls = 0;
    let mut look = |_, _| {
        calls += 1;
        assert_eq!(Checkpoint::open(dir.path()).unwrap().layer(0).unwrap().wq, old);
    };
    synthesize(dir.path(), &again, &mut look).unwrap();
    assert!(calls > 1);
    let mut made = contents(dir.path());
    assert_eq!(made.remove(&dir.path().join("notes.txt")).unwrap(), b"mine");
    let clean = synthesized(small(), 2);
    let named = |files: BTreeMap<PathBuf, Vec<u8>>| -> BTreeMap<_, _> {
        files.into_iter().map(|(path, bytes)| (path.file_name().unwrap().to_owned(), bytes)).collect()
    };
    assert_eq!(named(made), named(contents(clean.path())));
}

#[test]
fn one_directory_is_synthesized_into_once_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m");
    let synthesis = |seed, replace| Synthesis { geometry: small(), seed, replace };
    let mut calls = 0;
    let mut second = |_, _| {
        calls += 1;
        for replace in [false, true] {
            let refused = synthesize(&path, &synthesis(2, replace), &mut |_, _| ()).unwrap_err();
            assert!(matches!(&refused, SynthesisError::Write(WriteError::Busy(busy)) if *busy == path), "{refused}");
            assert!(refused.to_string().contains("another process"), "{refused}");
        }
    };
    synthesize(&path, &synthesis(1, false), &mut second).unwrap();
    assert!(calls > 0);
    let clean = synthesized(small(), 1);
    assert_eq!(
        contents(&path).into_values().collect::<Vec<_>>(),
        contents(clean.path()).into_values().collect::<Vec<_>>()
    );
    // The lock goes with the run.
    synthesize(&path, &synthesis(2, true), &mut |_, _| ()).unwrap();
}

#[test]
fn of_two_runs_that_begin_together_one_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..50 {
        let path = dir.path().join(round.to_string());
        let run = |seed| synthesize(&path, &Synthesis { geometry: small(), seed, replace: false }, &mut |_, _| ());
        let ended = std::thread::scope(|scope| {
            let other = scope.spawn(|| run(1));
            [run(2), other.join().unwrap()]
        });
        let refused: Vec<_> = ended.into_iter().filter_map(Result::err).collect();
        assert!(
            matches!(refused[..], [SynthesisError::Write(WriteError::Busy(_) | WriteError::NotEmpty(_))]),
            "{refused:?}"
        );
        assert_eq!(contents(&path).len(), 3);
    }
}

/// A tensor's type, shape and bytes.
type Stored = (Dtype, Vec<usize>, Vec<u8>);

/// A checkpoint to be changed and written again.
struct Edit {
    dir: TempDir,
    tensors: BTreeMap<String, Stored>,
}

impl Edit {
    fn new() -> Self {
        let dir = synthesized(small(), 1);
        let file = fs::read(dir.path().join(SINGLE_FILE)).unwrap();
        let header = Header::read(&file[..], file.len() as u64).unwrap();
        let data = &file[file.len() - header.data_length()..];
        let stored =
            |entry: Entry| (entry.dtype, entry.shape, data[entry.data_offsets.0..entry.data_offsets.1].to_vec());
        let tensors = header.tensors.into_iter().map(|(name, entry)| (name, stored(entry))).collect();
        Self { dir, tensors }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The tensors whose names `chosen` takes, as one file. `padding` spaces make its data begin at an odd address.
    fn file(&self, chosen: impl Fn(&str) -> bool, padding: usize) -> Vec<u8> {
        let (mut header, mut data) = (Header::default(), Vec::<u8>::new());
        for (name, (dtype, shape, bytes)) in self.tensors.iter().filter(|(name, _)| chosen(name)) {
            let data_offsets = (data.len(), data.len() + bytes.len());
            header.tensors.insert(name.clone(), Entry { dtype: *dtype, shape: shape.clone(), data_offsets });
            data.extend(bytes);
        }
        let mut file = header.encode().unwrap();
        file.extend(vec![b' '; padding]);
        let length = file.len() as u64 - 8;
        file[..8].copy_from_slice(&length.to_le_bytes());
        file.extend(data);
        file
    }

    /// Writes the tensors back as a single file.
    fn write(&self) {
        fs::write(self.path(SINGLE_FILE), self.file(|_| true, 0)).unwrap();
    }

    /// Writes them as two shards and an index.
    fn shard(&self) -> serde_json::Value {
        let _ = fs::remove_file(self.path(SINGLE_FILE));
        let second = |name: &str| name.starts_with("model.layers.1");
        fs::write(self.path("a.safetensors"), self.file(|name| !second(name), 0)).unwrap();
        fs::write(self.path("b.safetensors"), self.file(second, 0)).unwrap();
        let shard = |name: &String| if second(name) { "b.safetensors" } else { "a.safetensors" };
        let map: serde_json::Map<_, _> = self.tensors.keys().map(|name| (name.clone(), shard(name).into())).collect();
        let index = serde_json::json!({ "metadata": {}, "weight_map": map });
        fs::write(self.path(INDEX_FILE), index.to_string()).unwrap();
        index
    }

    fn config(&self, change: impl FnOnce(&mut serde_json::Value)) {
        let mut config = serde_json::from_slice(&fs::read(self.path(CONFIG_FILE)).unwrap()).unwrap();
        change(&mut config);
        fs::write(self.path(CONFIG_FILE), config.to_string()).unwrap();
    }

    fn open(&self) -> Checkpoint {
        Checkpoint::open(self.dir.path()).unwrap()
    }

    fn refusal(&self) -> String {
        Checkpoint::open(self.dir.path()).unwrap_err().to_string()
    }

    /// Holds every part of the refusal, and the file at fault at its beginning.
    fn is_refused(&self, file: &str, parts: &[&str]) {
        let message = self.refusal();
        let path = if file.is_empty() { self.dir.path().to_path_buf() } else { self.path(file) };
        assert!(message.starts_with(&format!("{}: ", path.display())), "{message}");
        for part in parts {
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
    }
}

const Q: &str = "model.layers.1.self_attn.q_proj.weight";
const Q_SCALE: &str = "model.layers.1.self_attn.q_proj.weight_scale";
const NORM: &str = "model.layers.0.input_layernorm.weight";

fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

#[test]
fn what_was_drawn_is_what_is_read() {
    let dir = synthesized(small(), 7);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.geometry(), &small());
    assert_eq!((checkpoint.rope_theta(), checkpoint.stop_ids()), (1e6, &[49, 48][..]));
    assert_eq!(checkpoint.tensors().count(), 3 + 2 * 18);
    let codes = Recipe::new(RecipeKind::Int8Normal { std: 32 });
    let drawn = |name: &str, shape| match seeded::tensor(7, name, DType::I8, shape, &codes).unwrap() {
        Tensor::I8(values) => values,
        other => panic!("{other:?}"),
    };
    let layer = checkpoint.layer(1).unwrap();
    // Logically [in, out]: the transposed view of what lies there.
    assert_eq!(layer.wk, drawn("model.layers.1.self_attn.k_proj.weight", [32, 64]).t());
    assert_eq!(layer.w_up, drawn("model.layers.1.mlp.up_proj.weight", [96, 64]).t());
    let DownWeight::Int8 { codes, scale } = layer.w_down else { panic!("codes are given as codes") };
    assert_eq!(codes, drawn("model.layers.1.mlp.down_proj.weight", [64, 96]).t());
    assert_eq!(scale.len(), 64);
    assert!(checkpoint.layer(2).is_none());
    assert_eq!(checkpoint.embed_tokens().dim(), (50, 64));
    assert_ne!(checkpoint.embed_tokens(), checkpoint.lm_head());
    assert!(layer.input_rms_weight.iter().all(|gamma| (gamma - 1.0).abs() < 0.5));
}

#[test]
fn the_same_seed_gives_the_same_files_and_another_seed_others() {
    let [first, second, other] = [3, 3, 4].map(|seed| synthesized(small(), seed));
    for name in [SINGLE_FILE, CONFIG_FILE, GENERATION_FILE] {
        let read = |dir: &TempDir| fs::read(dir.path().join(name)).unwrap();
        assert_eq!(read(&first), read(&second), "{name}");
        assert_eq!(read(&first) != read(&other), name == SINGLE_FILE, "{name}");
    }
    assert_eq!(fs::read_dir(first.path()).unwrap().count(), 3);
}

#[test]
fn a_directory_in_use_is_replaced_only_when_asked() {
    let dir = synthesized(small(), 1);
    fs::write(dir.path().join(".assay-x.tmp"), b"interrupted").unwrap();
    fs::write(dir.path().join("notes.txt"), b"mine").unwrap();
    let mut synthesis = Synthesis { geometry: small(), seed: 2, replace: false };
    let refused = synthesize(dir.path(), &synthesis, &mut |_, _| ());
    assert!(matches!(refused, Err(SynthesisError::Write(WriteError::NotEmpty(_)))));
    synthesis.replace = true;
    let mut seen = (0, 0);
    synthesize(dir.path(), &synthesis, &mut |written, total| seen = (written, total)).unwrap();
    assert_eq!(seen.0, seen.1);
    assert!(!dir.path().join(".assay-x.tmp").exists() && dir.path().join("notes.txt").exists());
    let layer = Checkpoint::open(dir.path()).unwrap();
    let fresh = synthesized(small(), 2);
    assert_eq!(layer.layer(0).unwrap().wq, Checkpoint::open(fresh.path()).unwrap().layer(0).unwrap().wq);
}

#[test]
fn without_its_last_file_a_run_leaves_no_checkpoint() {
    let edit = Edit::new();
    fs::remove_file(edit.path(CONFIG_FILE)).unwrap();
    edit.is_refused(CONFIG_FILE, &["is missing"]);
}

#[test]
fn shards_and_a_single_file_read_alike() {
    let edit = Edit::new();
    let single = edit.open();
    edit.shard();
    let sharded = edit.open();
    assert_eq!(sharded.shards().len(), 2);
    assert_eq!(single.layer(1).unwrap().wo, sharded.layer(1).unwrap().wo);
    assert_eq!(single.lm_head(), sharded.lm_head());
    edit.write();
    edit.is_refused("", &["holds both"]);
}

#[cfg(unix)]
#[test]
fn links_are_followed_and_what_is_no_file_is_refused() {
    let edit = Edit::new();
    edit.shard();
    let elsewhere = tempfile::tempdir().unwrap();
    let blob = elsewhere.path().join("blob");
    fs::rename(edit.path("b.safetensors"), &blob).unwrap();
    std::os::unix::fs::symlink(&blob, edit.path("b.safetensors")).unwrap();
    assert_eq!(edit.open().shards().len(), 2);
    fs::remove_file(&blob).unwrap();
    edit.is_refused("b.safetensors", &["No such file"]);
    fs::remove_file(edit.path("b.safetensors")).unwrap();
    fs::create_dir(edit.path("b.safetensors")).unwrap();
    edit.is_refused("b.safetensors", &["not a regular file"]);
    fs::remove_dir(edit.path("b.safetensors")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(edit.path("b.safetensors")).status();
    if made.is_ok_and(|status| status.success()) {
        edit.is_refused("b.safetensors", &["not a regular file"]);
    }
}

#[test]
fn tensors_that_are_missing_or_left_over_are_named() {
    type Change = fn(&mut BTreeMap<String, Stored>);
    let cases: [(Change, &str, &[&str]); 17] = [
        // INT8 weights without a scale, and a scale without INT8 weights.
        (|t| drop(t.remove(Q_SCALE)), SINGLE_FILE, &[Q_SCALE, "in no shard", Q, "searched model.safetensors"]),
        (
            |t| t.get_mut(Q).unwrap().to_bf16(),
            SINGLE_FILE,
            &[Q_SCALE, "is a scale", Q, "type BF16", "config.json declares it INT8", "searched model.safetensors"],
        ),
        (
            |t| {
                t.get_mut(Q).unwrap().to_bf16();
                t.remove(Q_SCALE);
            },
            SINGLE_FILE,
            &[Q, "type BF16", "declares it INT8"],
        ),
        (|t| drop(t.remove(Q)), "", &[Q, "in no shard"]),
        // Not tied, and no head.
        (
            |t| drop(t.remove(HEAD)),
            "",
            &[HEAD, "in no shard", "set tie_word_embeddings to true", "searched model.safetensors"],
        ),
        (|t| drop(t.remove(NORM)), "", &[NORM, "in no shard"]),
        (|t| t.put("lm_head.weight_scale", Dtype::F32, &[50, 1]), SINGLE_FILE, &["lm_head.weight_scale", "is a scale"]),
        (|t| t.put("model.layers.2.mlp.up_proj.weight", Dtype::I8, &[96, 64]), SINGLE_FILE, &["declares 2 layers"]),
        (|t| t.put("model.layers.0.mlp.up_proj.weight_zero_point", Dtype::I8, &[96, 1]), SINGLE_FILE, &["symmetric"]),
        (|t| t.put("model.layers.0.mlp.up_proj.bias", Dtype::F32, &[96]), SINGLE_FILE, &["up_proj.bias", "no bias"]),
        (|t| t.put("extra", Dtype::F32, &[1]), SINGLE_FILE, &["`extra`", "no tensor of that name"]),
        // Types and shapes.
        (|t| t.put(Q, Dtype::U8, &[64, 64]), SINGLE_FILE, &[Q_SCALE, "type U8"]),
        (|t| t.put(NORM, Dtype::F16, &[64]), SINGLE_FILE, &[NORM, "type F16", "BF16 or F32"]),
        (|t| t.put(EMBEDDING, Dtype::F16, &[50, 64]), SINGLE_FILE, &[EMBEDDING, "type F16"]),
        (|t| t.put(Q, Dtype::I8, &[32, 128]), SINGLE_FILE, &[Q, "[32, 128]", "[64, 64]"]),
        (|t| t.put(Q_SCALE, Dtype::F32, &[64]), SINGLE_FILE, &[Q_SCALE, "[64]", "[64, 1]"]),
        (|t| t.put(HEAD, Dtype::BF16, &[48, 64]), SINGLE_FILE, &[HEAD, "[48, 64]", "[50, 64]"]),
    ];
    for (change, file, parts) in cases {
        let mut edit = Edit::new();
        change(&mut edit.tensors);
        edit.write();
        edit.is_refused(file, parts);
    }
}

trait Change {
    fn to_bf16(&mut self);
}

impl Change for Stored {
    fn to_bf16(&mut self) {
        self.0 = Dtype::BF16;
        self.2 = vec![0; 2 * self.2.len()];
    }
}

trait Put {
    fn put(&mut self, name: &str, dtype: Dtype, shape: &[usize]);
}

impl Put for BTreeMap<String, Stored> {
    fn put(&mut self, name: &str, dtype: Dtype, shape: &[usize]) {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        self.insert(name.to_owned(), (dtype, shape.to_vec(), vec![0; bytes]));
    }
}

#[test]
fn values_that_no_model_has_are_named_by_index() {
    for (name, shape, value, rule) in [
        (Q_SCALE, vec![64, 1], f32::NAN, "a scale is finite"),
        (Q_SCALE, vec![64, 1], -1.0, "not negative"),
        (NORM, vec![64], f32::INFINITY, "a norm's weights are finite"),
    ] {
        let mut edit = Edit::new();
        let values = (0..64).map(|index| if index == 5 { value } else { 0.5 });
        edit.tensors.insert(name.into(), (Dtype::F32, shape, floats(values)));
        edit.write();
        edit.is_refused(SINGLE_FILE, &[name, "element 5", rule]);
    }
}

#[test]
fn an_index_and_its_shards_must_agree() {
    let edit = Edit::new();
    let index = edit.shard();
    let with = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let mut index = index.clone();
        change(index["weight_map"].as_object_mut().unwrap());
        fs::write(edit.path(INDEX_FILE), index.to_string()).unwrap();
    };
    with(&|map| drop(map.insert("ghost".into(), "b.safetensors".into())));
    edit.is_refused("b.safetensors", &["lacks tensor `ghost`"]);
    with(&|map| drop(map.shift_remove(NORM)));
    edit.is_refused("a.safetensors", &[NORM, "does not list"]);
    with(&|map| drop(map.insert(Q.into(), "c.safetensors".into())));
    edit.is_refused("b.safetensors", &[Q, "says lies in `c.safetensors`"]);
    for bad in ["../b.safetensors", "/b.safetensors", "x/b.safetensors", "..", ".", "", "x\\b.safetensors", "C:b"] {
        with(&|map| drop(map.insert(Q.into(), bad.into())));
        edit.is_refused(INDEX_FILE, &[Q, &format!("`{bad}`"), "no name of a file beside"]);
    }
    with(&serde_json::Map::clear);
    edit.is_refused(INDEX_FILE, &["empty"]);
    fs::write(edit.path(INDEX_FILE), r#"{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}"#).unwrap();
    edit.is_refused(INDEX_FILE, &["`x` twice"]);
    fs::write(edit.path(INDEX_FILE), "[".repeat(200_000)).unwrap();
    edit.is_refused(INDEX_FILE, &["not the JSON"]);
    fs::remove_file(edit.path(INDEX_FILE)).unwrap();
    edit.is_refused("", &["neither"]);
    with(&|_| ());
    let whole = fs::read(edit.path("b.safetensors")).unwrap();
    for length in [0, 7, 8, 100, whole.len() - 1] {
        fs::write(edit.path("b.safetensors"), &whole[..length]).unwrap();
        edit.is_refused("b.safetensors", &["cut short"]);
    }
    fs::write(edit.path("b.safetensors"), [&whole[..], b"x"].concat()).unwrap();
    edit.is_refused("b.safetensors", &["appended"]);
    fs::remove_file(edit.path("b.safetensors")).unwrap();
    edit.is_refused("b.safetensors", &["No such file"]);
}

#[test]
fn a_configuration_that_the_contract_does_not_compute_is_refused_by_key() {
    let edit = Edit::new();
    let good = fs::read(edit.path(CONFIG_FILE)).unwrap();
    let refused = |pointer: &str, value: serde_json::Value, parts: &[&str]| {
        fs::write(edit.path(CONFIG_FILE), &good).unwrap();
        edit.config(|config| {
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            config.pointer_mut(parent).unwrap().as_object_mut().unwrap().insert(key.into(), value);
        });
        edit.is_refused(CONFIG_FILE, parts);
    };
    use serde_json::json;
    refused("/model_type", json!("llama"), &["model_type", "\"llama\"", "\"qwen3\""]);
    refused("/architectures", json!(["Qwen3MoeForCausalLM"]), &["architectures", "Qwen3Moe"]);
    refused("/hidden_act", json!("gelu"), &["hidden_act", "gelu"]);
    refused("/attention_bias", json!(true), &["attention_bias"]);
    refused("/use_sliding_window", json!(true), &["use_sliding_window"]);
    refused("/layer_types", json!(["full_attention", "sliding_attention"]), &["layer_types[1]", "sliding"]);
    refused("/layer_types", json!(["full_attention"]), &["length of layer_types"]);
    refused("/rope_scaling", json!({"type": "yarn", "factor": 4.0}), &["rope_scaling.type", "yarn", "scaled rotary"]);
    let both = json!({"type": "yarn", "rope_type": "yarn", "factor": 4.0});
    refused("/rope_scaling", both, &["rope_scaling.type", "yarn", "scaled rotary positions are not supported"]);
    refused("/rope_scaling", json!({"factor": 4.0}), &["rope_scaling.factor", "4.0", "scaled rotary"]);
    refused("/rope_scaling", json!({"rope_theta": 5.0}), &["rope_scaling.rope_theta", "5.0"]);
    refused(
        "/rope_parameters",
        json!({"partial_rotary_factor": 0.5}),
        &["rope_parameters.partial_rotary_factor", "0.5"],
    );
    refused("/partial_rotary_factor", json!(0.5), &["partial_rotary_factor: is 0.5", "part of each head"]);
    refused("/rope_theta", json!(0.0), &["rope_theta: is 0.0; expected a positive number"]);
    refused("/rope_theta", json!(null), &["rope_theta: is missing"]);
    refused("/eos_token_id", json!(-1), &["eos_token_id: is -1; expected a token id"]);
    refused("/eos_token_id", json!([1, "x"]), &["eos_token_id: is \"x\""]);
    let long = "x".repeat(3_000_000);
    refused("/hidden_act", json!(long), &["hidden_act", "xxx ...", "expected \"silu\""]);
    refused("/hidden_size", json!(long), &["not the JSON", " ..."]);
    assert!(edit.refusal().len() < 3000);
    refused("/rope_parameters", json!({"rope_theta": 5.0}), &["rope_parameters.rope_theta", "5.0"]);
    refused("/rope_theta", json!(-1.0), &["rope_theta", "positive"]);
    refused("/head_dim", json!(15), &["head_dim is 15"]);
    refused("/hidden_size", json!(-1), &["not the JSON", "-1"]);
    refused("/rms_norm_eps", json!(0.0), &["rms_norm_eps"]);
    refused("/num_hidden_layers", json!(0), &["num_hidden_layers"]);
    refused("/quantization_config", json!(null), &["quantization_config", "missing"]);
    refused("/quantization_config/quant_method", json!("gptq"), &["quant_method", "gptq"]);
    refused("/quantization_config/format", json!("pack-quantized"), &["format", "pack-quantized"]);
    refused("/quantization_config/kv_cache_scheme", json!({"num_bits": 8}), &["kv_cache_scheme"]);
    refused("/quantization_config/transform_config", json!({"a": 1}), &["transform_config"]);
    refused("/quantization_config/sparsity_config", json!({"format": "2:4"}), &["sparsity_config"]);
    refused("/quantization_config/ignore", json!([]), &["ignore", "lm_head"]);
    let leaves_out = json!(["lm_head", "model.layers.1.mlp.down_proj"]);
    refused("/quantization_config/ignore", leaves_out, &["ignore", "model.layers.1.mlp.down_proj", "every projection"]);
    refused("/quantization_config/ignore", json!(["lm_head", "re:.*gate_proj"]), &["ignore", "re:.*gate_proj"]);
    let weights = "/quantization_config/config_groups/group_0/weights";
    refused(&format!("{weights}/num_bits"), json!(4), &["weights", "4 bits", "expected \"8 bits"]);
    refused(&format!("{weights}/strategy"), json!("group"), &["weights", "strategy group"]);
    refused(&format!("{weights}/symmetric"), json!(false), &["weights", "symmetric false"]);
    let activations = "/quantization_config/config_groups/group_0/input_activations";
    refused(activations, json!(null), &["input_activations", "missing"]);
    refused(&format!("{activations}/dynamic"), json!(false), &["input_activations", "dynamic false"]);
    // A size that the tensors do not have is theirs to contradict.
    fs::write(edit.path(CONFIG_FILE), &good).unwrap();
    edit.config(|config| config["vocab_size"] = json!(51));
    edit.is_refused(SINGLE_FILE, &[EMBEDDING, "[50, 64]", "[51, 64]"]);
}

#[test]
fn both_forms_of_a_configuration_are_read() {
    let edit = Edit::new();
    edit.config(|config| {
        config.as_object_mut().unwrap().shift_remove("rope_theta");
        config["rope_parameters"] = serde_json::json!({"rope_theta": 500_000.0, "rope_type": "default"});
        config["rope_scaling"] = serde_json::json!({"type": "default", "rope_type": "default"});
        config["partial_rotary_factor"] = serde_json::json!(1.0);
        config["eos_token_id"] = serde_json::json!([7, 48]);
        config["quantization_config"]["ignore"] = serde_json::json!(["re:.*lm_head"]);
        config["quantization_config"]["sparsity_config"] = serde_json::json!({});
    });
    let checkpoint = edit.open();
    assert_eq!((checkpoint.rope_theta(), checkpoint.stop_ids()), (5e5, &[7, 48, 49][..]));
    fs::remove_file(edit.path(GENERATION_FILE)).unwrap();
    assert_eq!(edit.open().stop_ids(), [7, 48]);
}

#[test]
fn what_is_said_twice_is_refused_at_any_depth() {
    let edit = Edit::new();
    let good = fs::read_to_string(edit.path(CONFIG_FILE)).unwrap();
    for (key, again) in [
        ("\"num_bits\": 8", "\"num_bits\": 4, \"num_bits\": 8"),
        ("\"group_0\":", "\"group_0\": {}, \"group_0\":"),
        ("\"head_dim\":", "\"head_dim\": 8, \"head_dim\":"),
    ] {
        assert!(good.contains(key));
        fs::write(edit.path(CONFIG_FILE), good.replacen(key, again, 1)).unwrap();
        let name = again.split('"').nth(1).unwrap();
        edit.is_refused(CONFIG_FILE, &[&format!("gives `{name}` twice"), "line"]);
    }
}

#[test]
fn a_missing_configuration_says_what_a_checkpoint_holds() {
    let edit = Edit::new();
    fs::remove_file(edit.path(CONFIG_FILE)).unwrap();
    edit.is_refused(CONFIG_FILE, &["is missing", "a checkpoint directory holds", SINGLE_FILE, INDEX_FILE]);
}

#[test]
fn stop_ids_are_few_and_each_once() {
    let edit = Edit::new();
    let with =
        |ids: Vec<usize>| fs::write(edit.path(GENERATION_FILE), serde_json::json!({"eos_token_id": ids}).to_string());
    with((0..1024).collect()).unwrap();
    assert_eq!(edit.open().stop_ids().len(), 1024);
    with((0..1_000_000).collect()).unwrap();
    edit.is_refused(GENERATION_FILE, &["eos_token_id", "lists 1000000 ids", "at most 1024"]);
}

#[test]
fn stop_ids_say_where_they_come_from() {
    let edit = Edit::new();
    let both = edit.open();
    let told = |checkpoint: &Checkpoint| -> Vec<_> {
        checkpoint.stop_sources().iter().map(|stop| (stop.id, stop.files.clone())).collect()
    };
    assert_eq!(told(&both), [(49, vec![CONFIG_FILE, GENERATION_FILE]), (48, vec![GENERATION_FILE])]);
    edit.config(|config| config["eos_token_id"] = serde_json::json!([7, 7, 48]));
    let [config, generation] = [vec![CONFIG_FILE], vec![GENERATION_FILE]];
    let other = edit.open();
    assert_eq!(told(&other), [(7, config), (48, vec![CONFIG_FILE, GENERATION_FILE]), (49, generation)]);
    assert_eq!(other.stop_ids(), [7, 48, 49]);
    assert!(!other.remarks().iter().any(|remark| remark.contains("stop id")), "{:?}", other.remarks());
    for (value, told) in [("true", "is true"), ("1.5", "is 1.5"), ("[[1]]", "is [1]"), ("{}", "is {}")] {
        fs::write(edit.path(GENERATION_FILE), format!("{{\"eos_token_id\": {value}}}")).unwrap();
        edit.is_refused(GENERATION_FILE, &["eos_token_id", told, "expected a token id"]);
    }
    fs::remove_file(edit.path(GENERATION_FILE)).unwrap();
    edit.config(|config| drop(config.as_object_mut().unwrap().shift_remove("eos_token_id")));
    let none = edit.open();
    assert!(none.stop_ids().is_empty() && none.remarks().iter().any(|remark| remark.contains("lists a stop id")));
}

#[test]
fn broken_text_is_refused_wherever_it_breaks_off() {
    let edit = Edit::new();
    edit.shard();
    for name in [CONFIG_FILE, INDEX_FILE, GENERATION_FILE] {
        let whole = fs::read(edit.path(name)).unwrap();
        let end = whole.trim_ascii_end().len();
        for length in (0..end).step_by(end.div_ceil(60)) {
            fs::write(edit.path(name), &whole[..length]).unwrap();
            edit.is_refused(name, &["not the JSON"]);
        }
        fs::write(edit.path(name), whole).unwrap();
    }
    edit.open();
}

#[test]
fn a_tied_head_is_the_embedding_whatever_else_is_there() {
    let mut edit = Edit::new();
    edit.config(|config| config["tie_word_embeddings"] = true.into());
    let differs = edit.open();
    assert_eq!(differs.head_source(), HeadSource::TiedOverridden);
    assert_eq!(differs.lm_head(), differs.embed_tokens());
    assert!(differs.remarks().iter().any(|remark| remark.contains("the embedding is used")), "{:?}", differs.remarks());
    let embedding = edit.tensors[EMBEDDING].clone();
    // The same numbers in another type repeat it too.
    let wide = |bytes: &[u8]| floats(bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()));
    let repeated = [embedding.clone(), (Dtype::F32, embedding.1.clone(), wide(&embedding.2))];
    for head in repeated {
        edit.tensors.insert(HEAD.into(), head);
        edit.write();
        assert!(edit.open().remarks().iter().any(|remark| remark.contains("repeats")));
        assert_eq!(edit.open().head_source(), HeadSource::TiedRepeated);
    }
    edit.tensors.put(HEAD, Dtype::BF16, &[49, 64]);
    edit.write();
    edit.is_refused(SINGLE_FILE, &[HEAD, "[49, 64]"]);
    edit.tensors.remove(HEAD);
    edit.write();
    let tied = edit.open();
    assert_eq!(tied.head_source(), HeadSource::Tied);
    assert!(tied.tied() && !tied.remarks().iter().any(|remark| remark.contains("tie")));
    assert_eq!(tied.lm_head(), tied.embed_tokens());
}

#[test]
fn fp32_is_widened_scale_by_scale_and_rounded_as_a_matrix() {
    let mut edit = Edit::new();
    // 1 + 2^-8 lies midway between two BF16 numbers, and goes to the even one.
    let wide = |index: usize| 1.0 + index as f32 / 256.0;
    edit.tensors.insert(EMBEDDING.into(), (Dtype::F32, vec![50, 64], floats((0..3200).map(|i| wide(i % 128)))));
    edit.tensors.insert(Q_SCALE.into(), (Dtype::F32, vec![64, 1], floats((0..64).map(wide))));
    edit.tensors.insert(NORM.into(), (Dtype::F32, vec![64], floats((0..64).map(wide))));
    edit.write();
    let checkpoint = edit.open();
    assert_eq!(checkpoint.layer(1).unwrap().wq_scale[1], 1.003_906_25);
    assert_eq!(checkpoint.layer(0).unwrap().input_rms_weight[3], 1.011_718_75);
    let embedding = checkpoint.embed_tokens();
    assert_eq!([embedding[(0, 1)].to_f32(), embedding[(0, 3)].to_f32()], [1.0, 1.015_625]);
    assert_eq!(embedding.row(49)[63].to_f32(), bf16::from_f32(wide(3199 % 128)).to_f32());
    let conversions = checkpoint.conversions();
    let told: Vec<_> = conversions.iter().map(|kind| (kind.tensors, &*kind.from, &*kind.to)).collect();
    let expected = [
        ("embedding", "F32", "BF16"),
        ("norms", "BF16", "F32"),
        ("down projections", "I8", "BF16"),
        ("scales", "BF16", "F32"),
    ];
    assert_eq!(told.len(), expected.len(), "{told:?}");
    assert!(expected.iter().all(|kind| told.contains(kind)), "{told:?}");
    assert!(checkpoint.remarks().iter().any(|remark| remark.contains(EMBEDDING) && remark.contains("FP32")));
}

#[test]
fn an_odd_address_changes_nothing() {
    let edit = Edit::new();
    let even = edit.open();
    for padding in 1..8 {
        fs::write(edit.path("other"), edit.file(|_| true, padding)).unwrap();
        fs::rename(edit.path("other"), edit.path(SINGLE_FILE)).unwrap();
        let odd = edit.open();
        assert_eq!(even.embed_tokens(), odd.embed_tokens());
        assert_eq!(even.lm_head(), odd.lm_head());
        assert_eq!(even.layer(1).unwrap().wv, odd.layer(1).unwrap().wv);
        assert_eq!(even.layer(1).unwrap().wv_scale, odd.layer(1).unwrap().wv_scale);
        assert_eq!(odd.remarks().iter().any(|remark| remark.contains("odd address")), padding % 2 == 1);
    }
}

#[test]
fn the_lowest_codes_are_counted() {
    let mut edit = Edit::new();
    assert_eq!(edit.open().lowest_codes(), 0);
    let codes = &mut edit.tensors.get_mut(Q).unwrap().2;
    (codes[0], codes[77]) = (0x80, 0x80);
    edit.write();
    assert_eq!(edit.open().lowest_codes(), 2);
    assert_eq!(edit.open().layer(1).unwrap().wq[(0, 0)], -128);
}

mod damaged {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        // What opens in spite of the damage can be used whole.
        #[test]
        fn a_damaged_file_is_refused_or_read(which in 0usize..4, changes in prop::collection::vec((0.0..1.0f64, any::<u8>()), 1..4)) {
            let edit = Edit::new();
            edit.shard();
            let path = edit.path([CONFIG_FILE, INDEX_FILE, "a.safetensors", "b.safetensors"][which]);
            let mut bytes = fs::read(&path).unwrap();
            // Text at the beginning of shards is where damage tells.
            let reach = bytes.len().min(4000) as f64;
            for (at, byte) in changes {
                bytes[(at * reach) as usize] = byte;
            }
            fs::write(&path, bytes).unwrap();
            match Checkpoint::open(edit.dir.path()) {
                Ok(checkpoint) => {
                    let layers = checkpoint.geometry().num_hidden_layers;
                    prop_assert!((0..layers).all(|layer| checkpoint.layer(layer).is_some()));
                    prop_assert_eq!(checkpoint.lm_head().dim(), checkpoint.embed_tokens().dim());
                }
                Err(error) => prop_assert!(error.to_string().contains(edit.dir.path().to_str().unwrap())),
            }
        }
    }
}
