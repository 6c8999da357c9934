//! Checkpoints of other people's tools, where they are at hand (`ASSAY_FIXTURES` names their directory): the tokens that
//! the reference generates are those that Hugging Face's own forward generates, and the logits are compared with every
//! definition that was recorded. How far they may lie apart is no tolerance of ours: each definition was recorded in
//! several precisions, and what those differ by among themselves is printed beside what the reference differs by.

// Test code from end to end.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use cases::Checkpoint;
use cases::seeded::{Rope, rope};
use ndarray::{Array1, s};
use reference::generate::{Decoder, Limits};
use reference::head::{final_norm, lm_head};
use reference::model::PagedCache;
use reference::prefill::{Prompt, prefill};
use reference::{PAGE, Policy};
use serde_json::Value;

/// Where the recorded models are; none: the test says so and ends.
fn fixtures() -> Option<PathBuf> {
    let dir = std::env::var_os("ASSAY_FIXTURES").map(PathBuf::from);
    if dir.is_none() {
        eprintln!("skipped: ASSAY_FIXTURES names no directory of recorded models");
    }
    dir
}

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as usize).collect()
}

/// A one-dimensional little-endian FP32 array of NumPy's.
fn npy(path: &Path) -> Vec<f32> {
    let bytes = fs::read(path).unwrap();
    let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let text = String::from_utf8_lossy(&bytes[10..header]);
    assert!(text.contains("'<f4'") && bytes[6] == 1, "{}: {text}", path.display());
    bytes[header..].chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// The same checkpoint under another config.json.
fn with_config(dir: &Path, config: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name();
        if name != "config.json" && entry.path().is_file() {
            fs::copy(entry.path(), copy.path().join(name)).unwrap();
        }
    }
    fs::copy(dir.join(config), copy.path().join("config.json")).unwrap();
    copy
}

/// The logits at each prompt's last token.
fn logits(model: &Checkpoint, prompts: &[Vec<usize>]) -> Vec<Array1<f32>> {
    let (geometry, policy) = (model.geometry(), Policy::production());
    let table = |which| rope(which, PAGE, geometry.head_dim, model.rope_theta()).unwrap();
    let (cos, sin) = (table(Rope::Cos), table(Rope::Sin));
    let last = |prompt: &Vec<usize>| {
        let mut cache = PagedCache::new(geometry, 1).unwrap();
        let prompt = [Prompt { tokens: prompt, start: 0, pages: &[0] }];
        let out = prefill(model, &prompt, cos.view(), sin.view(), &policy, &mut cache, &mut |_, _| ()).unwrap();
        let row = out.slice(s![out.nrows() - 1.., ..]);
        let normed = final_norm(row, model.final_norm(), geometry.rms_norm_eps, policy.freedom);
        lm_head(normed.view(), model.lm_head(), &policy).row(0).to_owned()
    };
    prompts.iter().map(last).collect()
}

/// The tokens that the reference generates from all prompts together.
fn generated(model: &Checkpoint, prompts: &[Vec<usize>], new: usize) -> Vec<Vec<usize>> {
    let table = |which| rope(which, 256, model.geometry().head_dim, model.rope_theta()).unwrap();
    let limits = Limits { max_new_tokens: new, max_seq_len: 256, stop_ids: model.stop_ids().to_vec() };
    let tables = [table(Rope::Cos), table(Rope::Sin)];
    let mut decoder = Decoder::new(model, tables, prompts.to_vec(), limits, Policy::production()).unwrap();
    while decoder.advance().unwrap() {}
    decoder.sequences().iter().map(|row| row.tokens()).collect()
}

/// Holds a checkpoint to what was recorded for it, `definitions` by name. Gives the definitions seen.
fn hold(title: &str, dir: &Path, expected: &Path, prompts: &[Vec<usize>], new: usize, definitions: &Value) -> usize {
    let model = Checkpoint::open(dir).unwrap();
    let (tokens, logits) = (generated(&model, prompts, new), logits(&model, prompts));
    let definitions = definitions.as_object().unwrap();
    for (name, recorded) in definitions {
        for (recorded, (tokens, logits)) in recorded.as_array().unwrap().iter().zip(tokens.iter().zip(&logits)) {
            assert_eq!(*tokens, numbers(&recorded["greedy"]), "{title}: {name}");
            let theirs = npy(&expected.join(recorded["logits_file"].as_str().unwrap()));
            assert_eq!(theirs.len(), logits.len());
            let apart: Vec<f64> = logits.iter().zip(&theirs).map(|(a, b)| f64::from(a - b).abs()).collect();
            let (most, squares) = (apart.iter().copied().fold(0.0, f64::max), apart.iter().map(|d| d * d).sum::<f64>());
            let margin = recorded["top1_top2_margin"][0].as_f64().unwrap();
            eprintln!(
                "{title}: {name}, prompt of {}: logits differ by {most:.3} at most, {:.3} root mean square; its margin is {margin:.2}",
                recorded["prompt_len"],
                (squares / apart.len() as f64).sqrt(),
            );
        }
    }
    definitions.len()
}

#[test]
fn tokens_of_recorded_models_are_those_of_their_own_forward() {
    let Some(fixtures) = fixtures() else { return };
    let mut seen = 0;
    let read = |dir: &Path| -> Value {
        serde_json::from_slice(&fs::read(dir.join("expected/expected.json")).unwrap()).unwrap()
    };
    let prompts = |all: &Value| all["prompts"].as_array().unwrap().iter().map(numbers).collect::<Vec<_>>();
    let root = fixtures.join("qwen3-tiny-w8a8");
    let all = read(&root);
    eprintln!("what the recorded definitions differ by among themselves: {}", all["noise_max_abs_logit_difference"]);
    for (variant, definitions) in all["variants"].as_object().unwrap() {
        let new = all["n_new"].as_u64().unwrap() as usize;
        let dir = root.join(variant);
        seen += hold(variant, &dir, &root.join("expected"), &prompts(&all), new, definitions);
        let older = fs::read_dir(&dir).unwrap().filter_map(Result::ok).map(|entry| entry.file_name());
        for config in older.filter(|name| name.to_string_lossy().starts_with("config.llm")) {
            let copy = with_config(&dir, &config.to_string_lossy());
            let title = format!("{variant} under {}", config.to_string_lossy());
            seen += hold(&title, copy.path(), &root.join("expected"), &prompts(&all), new, definitions);
        }
    }
    let root = fixtures.join("qwen3-tiny-w8a8-msmodelslim");
    let all = read(&root);
    let new = all["n_new"].as_u64().unwrap() as usize;
    seen += hold("Ascend form", &root, &root.join("expected"), &prompts(&all), new, &all["variants"]);
    assert!(seen >= 3, "{seen} definitions");
}
