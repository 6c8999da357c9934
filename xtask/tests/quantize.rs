//! `assay model quantize` from outside: what it writes, what `inspect` says of it, and what is refused.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

fn assay(args: &[&str], dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
    command.args(args).current_dir(dir).stdin(Stdio::null()).output().unwrap()
}

fn inspected(dir: &Path, model: &str) -> Value {
    let run = assay(&["model", "inspect", model, "--codes", "--fingerprint", "--format", "json"], dir);
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert!(run.stderr.is_empty(), "no progress in a pipe");
    serde_json::from_slice(&run.stdout).unwrap()
}

/// A BF16 model of one small layer in `dir`. Weights go from -1.375 to 1.375, where compressors' rules differ.
fn write_source(dir: &Path) {
    fs::create_dir(dir).unwrap();
    let (hidden, inner, head_dim, vocabulary) = (64, 96, 16, 50);
    let projections = [
        ("self_attn.q_proj", [64, hidden]),
        ("self_attn.k_proj", [32, hidden]),
        ("self_attn.v_proj", [32, hidden]),
        ("self_attn.o_proj", [hidden, 64]),
        ("mlp.gate_proj", [inner, hidden]),
        ("mlp.up_proj", [inner, hidden]),
        ("mlp.down_proj", [hidden, inner]),
    ];
    let norms = [
        ("input_layernorm", hidden),
        ("post_attention_layernorm", hidden),
        ("self_attn.q_norm", head_dim),
        ("self_attn.k_norm", head_dim),
    ];
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![vocabulary, hidden]),
        ("lm_head.weight".into(), vec![vocabulary, hidden]),
        ("model.norm.weight".into(), vec![hidden]),
    ];
    shapes.extend(projections.map(|(name, shape)| (format!("model.layers.0.{name}.weight"), shape.to_vec())));
    shapes.extend(norms.map(|(name, width)| (format!("model.layers.0.{name}.weight"), vec![width])));
    let data: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let value = |index: usize| bf16::from_f32((index % 23) as f32 / 8.0 - 1.375);
            let bytes = (0..shape.iter().product()).flat_map(|index| value(index).to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    let views =
        data.iter().map(|(name, shape, bytes)| (name, TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    let config = json!({
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": 7, "hidden_act": "silu",
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    fs::write(dir.join("generation_config.json"), r#"{"eos_token_id": [8, 7]}"#).unwrap();
}

#[test]
fn a_model_is_quantized_and_inspected() {
    let dir = tempfile::tempdir().unwrap();
    write_source(&dir.path().join("source"));
    let quantize = |args: &[&str]| assay(&[&["model", "quantize", "source"], args].concat(), dir.path());
    let made = quantize(&["out"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    assert!(made.stdout.is_empty() && made.stderr.is_empty());
    let first = inspected(dir.path(), "out");
    assert_eq!(first["form"], "Hugging Face (compressed-tensors)");
    assert_eq!(first["stop_ids"], json!([7, 8]));
    assert_eq!(first["stop_id_sources"][1], json!({"id": 8, "files": ["generation_config.json"]}));
    assert_eq!(first["head"], "of its own");
    assert_eq!((&first["codes_of_minus_128"], &first["dtypes"]["F32"]["tensors"]), (&json!(0), &json!(7)));
    assert_eq!(first["fingerprint"].as_str().unwrap().len(), 64);
    assert!(first["conversions"].as_array().unwrap().iter().any(|kind| kind["tensors"] == "norms"));
    let human = assay(&["model", "inspect", "out", "--fingerprint"], dir.path()).stdout;
    let human = String::from_utf8(human).unwrap();
    for part in ["7, 8 (config.json: 7; generation_config.json: 7, 8)", first["fingerprint"].as_str().unwrap()] {
        assert!(human.contains(part), "{human} lacks {part}");
    }

    let again = quantize(&["out"]);
    let message = String::from_utf8(again.stderr).unwrap();
    assert!(again.status.code() == Some(2) && message.contains("out: is not empty") && message.contains("--force"));
    let other = quantize(&["out", "--force", "--rule", "llmcompressor"]);
    assert!(other.status.success(), "{}", String::from_utf8_lossy(&other.stderr));
    let second = inspected(dir.path(), "out");
    assert_ne!(second["fingerprint"], first["fingerprint"]);
    assert!(second["codes_of_minus_128"].as_u64().unwrap() > 0);

    let unknown = quantize(&["new", "--rule", "nosuch"]);
    let message = String::from_utf8(unknown.stderr).unwrap();
    assert!(unknown.status.code() == Some(2) && message.contains("llmcompressor-float32"), "{message}");
    // A checkpoint that is quantized is no source, and a source is no checkpoint; each says what to do.
    for (args, told) in [
        (["model", "quantize", "out", "new"].as_slice(), "quantized already"),
        (["model", "quantize", "source", "source", "--force"].as_slice(), "name another directory"),
        (["model", "inspect", "source"].as_slice(), "assay model quantize"),
    ] {
        let refused = assay(args, dir.path());
        let message = String::from_utf8(refused.stderr).unwrap();
        assert!(refused.status.code() == Some(2) && message.contains(told), "{message}");
        assert!(!dir.path().join("new").exists());
    }
}
