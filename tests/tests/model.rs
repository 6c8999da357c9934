//! Whole models from checkpoints on disk: a decode step through mapped weights against the same step computed layer
//! by layer from copies in the kernels' own layout; and checkpoints of two compressors, where they are at hand, against
//! the rules that claim to be theirs.

// Test code from end to end.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use cases::Checkpoint;
use cases::checkpoint::{CONFIG_FILE, Form, Quantization, Rule, Synthesis, quantize, synthesize};
use cases::seeded::{self, Rope};
use half::bf16;
use ndarray::{Array2, s};
use reference::head::greedy;
use reference::model::{Decoded, PagedCache, Step, decode_step};
use reference::rounding::{Rounding, to_bf16};
use reference::stages::run_layer;
use reference::{BATCH, Batch, Cache, DownWeight, Geometry, LayerInputs, LayerWeights, PAGE, Policy, Site, TensorId};

fn checkpoint(geometry: Geometry, seed: u64) -> (tempfile::TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    synthesize(dir.path(), &Synthesis { geometry, seed, replace: false }, &mut |_, _| ()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

fn tables(checkpoint: &Checkpoint, positions: usize) -> [Array2<f32>; 2] {
    let table = |which| seeded::rope(which, positions, checkpoint.geometry().head_dim, checkpoint.rope_theta());
    [table(Rope::Cos).unwrap(), table(Rope::Sin).unwrap()]
}

/// One page a row; padding rows repeat row 0.
fn batch(active: usize, context: usize) -> Batch {
    let page = |row: usize| if row < active { row } else { 0 };
    Batch {
        active,
        seq_lens: [context; BATCH],
        block_table: (0..BATCH).map(|row| vec![page(row) as i32]).collect(),
        slots: std::array::from_fn(|row| page(row) * PAGE + context - 1),
    }
}

/// Runs `steps` greedy steps and hands each to `see`.
fn generate(
    checkpoint: &Checkpoint,
    first: &[usize],
    steps: usize,
    policy: &Policy,
    mut see: impl FnMut(&[usize], &Batch, &Decoded),
) {
    let [cos, sin] = tables(checkpoint, PAGE);
    let mut cache = PagedCache::new(checkpoint.geometry(), BATCH).unwrap();
    let mut tokens = first.to_vec();
    for context in 1..=steps {
        let batch = batch(tokens.len(), context);
        let step = Step { batch: &batch, rope_cos: cos.view(), rope_sin: sin.view(), policy };
        let done = decode_step(checkpoint, &tokens, &step, &mut cache, &mut |_, _| ()).unwrap();
        see(&tokens, &batch, &done);
        let vocabulary = checkpoint.geometry().real_vocab_size;
        tokens = done.logits.rows().into_iter().map(|row| greedy(row, vocabulary).unwrap()).collect();
    }
}

/// A weight as the kernels hold it: `[in, out]`, row-major, with the down projection in BF16.
struct Copied {
    codes: Vec<Array2<i8>>,
    down: Array2<bf16>,
}

impl Copied {
    fn of(weights: &LayerWeights<'_>) -> Self {
        let w = weights;
        let codes = [w.wq, w.wk, w.wv, w.wo, w.w_gate, w.w_up].map(|w| w.as_standard_layout().into_owned());
        let DownWeight::Int8 { codes: down, scale } = w.w_down else { panic!("a checkpoint holds codes") };
        let value = |(k, n)| to_bf16(f32::from(down[(k, n)]) * scale[n], Rounding::Rne);
        Self { codes: codes.to_vec(), down: Array2::from_shape_fn(down.dim(), value) }
    }

    fn weights<'a>(&'a self, of: &LayerWeights<'a>) -> LayerWeights<'a> {
        let [wq, wk, wv, wo, w_gate, w_up] = [0, 1, 2, 3, 4, 5].map(|index: usize| self.codes[index].view());
        LayerWeights { wq, wk, wv, wo, w_gate, w_up, w_down: DownWeight::Bf16(self.down.view()), ..*of }
    }
}

#[test]
fn a_step_of_a_checkpoint_is_the_step_of_its_layers() {
    let geometry = Geometry { num_hidden_layers: 2, ..Geometry::named("mini").unwrap() };
    let (_dir, checkpoint) = checkpoint(geometry, 5);
    let geometry = checkpoint.geometry();
    let policy = Policy::production();
    let [cos, sin] = tables(&checkpoint, PAGE);
    let (heads, dim) = (geometry.num_key_value_heads, geometry.head_dim);
    let copies: Vec<Copied> = (0..2).map(|layer| Copied::of(&checkpoint.layer(layer).unwrap())).collect();
    let empty = Array2::from_elem((BATCH * heads * PAGE, dim), bf16::ZERO);
    let mut caches = vec![[empty.clone(), empty]; 2];
    let (mut steps, mut chosen) = (0, Vec::new());
    generate(&checkpoint, &[17, 900], 3, &policy, |tokens, batch, done| {
        let token = |row: usize| if row < 2 { tokens[row] } else { tokens[0] };
        let table = checkpoint.embed_tokens();
        let mut hidden = Array2::from_shape_fn((BATCH, geometry.hidden_size), |(row, i)| table[(token(row), i)]);
        for (layer, [k, v]) in caches.iter_mut().enumerate() {
            let mapped = checkpoint.layer(layer).unwrap();
            let inputs = LayerInputs {
                geometry,
                batch,
                hidden_states: hidden.view(),
                weights: copies[layer].weights(&mapped),
                rope_cos: cos.view(),
                rope_sin: sin.view(),
                cache: Cache { k: k.view(), v: v.view() },
            };
            let trace = run_layer(&inputs, &policy);
            hidden = trace.bf16(TensorId::Out).to_owned();
            for row in 0..2 {
                for head in 0..heads {
                    let at = (row * heads + head) * PAGE + batch.seq_lens[row] - 1;
                    let part = s![row, head * dim..(head + 1) * dim];
                    k.row_mut(at).assign(&trace.bf16(TensorId::KRows).slice(part));
                    v.row_mut(at).assign(&trace.bf16(TensorId::VRows).slice(part));
                }
            }
        }
        assert_eq!(done.hidden_states, hidden);
        let (gamma, head) = (checkpoint.final_norm(), checkpoint.lm_head());
        for row in 0..2 {
            let x: Vec<f32> = hidden.row(row).iter().map(|x| x.to_f32()).collect();
            let mean = lanes(x.len(), |i| x[i] * x[i]) * (1.0 / x.len() as f32);
            let inv = (1.0 / f64::from(mean + geometry.rms_norm_eps).sqrt()) as f32;
            let n = |i: usize| to_bf16((x[i] * inv) * gamma[i], policy.at(Site::FinalNorm)).to_f32();
            let n: Vec<f32> = (0..x.len()).map(n).collect();
            let logits: Vec<f32> = head.rows().into_iter().map(|w| lanes(n.len(), |i| n[i] * w[i].to_f32())).collect();
            assert_eq!(done.logits.row(row).to_vec(), logits);
            let best = logits.iter().copied().fold(f32::MIN, f32::max);
            chosen.push(logits.iter().position(|&logit| logit == best).unwrap());
        }
        if steps > 0 {
            assert_eq!(tokens, &chosen[2 * steps - 2..2 * steps]);
        }
        steps += 1;
    });
    assert_eq!(steps, 3);
}

/// The canonical order: eight lanes of runs, two runs at a time, then adjacent pairs.
fn lanes(n: usize, term: impl Fn(usize) -> f32) -> f32 {
    let lane = |lane: usize| {
        let terms: Vec<f32> = (lane..n).step_by(8).map(&term).collect();
        let runs: Vec<f32> = terms.chunks(16).map(|run| run.iter().fold(0.0, |sum, term| sum + term)).collect();
        runs.chunks(2).fold(0.0, |sum, two| sum + (two[0] + two.get(1).unwrap_or(&0.0)))
    };
    let [a, b, c, d, e, f, g, h] = std::array::from_fn(lane);
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}

#[test]
fn activations_keep_their_size_through_forty_layers() {
    let geometry = Geometry {
        hidden_size: 256,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 64,
        intermediate_size: 512,
        num_hidden_layers: 40,
        vocab_size: 400,
        real_vocab_size: 400,
        rms_norm_eps: 1e-6,
    };
    let (_dir, checkpoint) = checkpoint(geometry, 3);
    let rms = |values: &mut dyn Iterator<Item = f32>| {
        let (count, sum) = values.fold((0, 0.0), |(count, sum), x| (count + 1, sum + f64::from(x) * f64::from(x)));
        (sum / f64::from(count)).sqrt()
    };
    let mut generated = Vec::new();
    generate(&checkpoint, &[3, 7, 11, 200], 6, &Policy::rne(), |tokens, _, done| {
        let first =
            rms(&mut tokens.iter().flat_map(|&id| checkpoint.embed_tokens().row(id).to_vec()).map(bf16::to_f32));
        let last = rms(&mut done.hidden_states.iter().map(|x| x.to_f32()));
        assert!(last.is_finite() && last > 0.5 * first && last < 4.0 * first, "{first} became {last}");
        let logits = rms(&mut done.logits.iter().copied());
        assert!(logits > 0.5 && logits < 8.0, "logits of {logits}");
        generated.extend_from_slice(tokens);
    });
    // Tokens that never change would say that rows or layers do not matter.
    generated.sort_unstable();
    generated.dedup();
    assert!(generated.len() > 12, "{generated:?}");
}

/// The directory of checkpoints that other tools wrote from one model: `qwen3-tiny-source` in BF16,
/// `qwen3-tiny-w8a8/{bf16-scale,f32-scale}` by llmcompressor, `qwen3-tiny-w8a8-msmodelslim` by msmodelslim. They are no
/// part of the repository.
fn fixtures() -> Option<PathBuf> {
    let named = std::env::var_os("ASSAY_FIXTURES").filter(|path| !path.is_empty()).map(PathBuf::from);
    if named.is_none() {
        println!("skipped: ASSAY_FIXTURES does not name the directory of checkpoints that the compressors wrote");
    }
    named
}

/// Type and bytes of every tensor of the `.safetensors` files in a directory.
fn stored(dir: &Path) -> BTreeMap<String, (safetensors::Dtype, Vec<u8>)> {
    let mut tensors = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|kind| kind == "safetensors") {
            let file = fs::read(&path).unwrap();
            for (name, view) in safetensors::SafeTensors::deserialize(&file).unwrap().tensors() {
                tensors.insert(name, (view.dtype(), view.data().to_vec()));
            }
        }
    }
    tensors
}

#[test]
fn the_rules_of_the_compressors_give_their_bytes() {
    let Some(fixtures) = fixtures() else { return };
    let out = tempfile::tempdir().unwrap();
    for (rule, theirs, form) in [
        (Rule::LlmCompressor, "qwen3-tiny-w8a8/bf16-scale", Form::HuggingFace),
        (Rule::LlmCompressorFloat32, "qwen3-tiny-w8a8/f32-scale", Form::HuggingFace),
        (Rule::MsModelSlim, "qwen3-tiny-w8a8-msmodelslim", Form::Ascend),
    ] {
        let (dir, theirs) = (out.path().join(rule.name()), fixtures.join(theirs));
        let how = Quantization { rule, replace: false };
        quantize(&fixtures.join("qwen3-tiny-source"), &dir, &how, &mut |_, _| ()).unwrap();
        let (ours, expected) = (stored(&dir), stored(&theirs));
        let quantized = |name: &&String| name.ends_with("_proj.weight") || name.ends_with("_proj.weight_scale");
        let names: Vec<&String> = expected.keys().filter(quantized).collect();
        assert_eq!(names.len(), 3 * 7 * 2);
        for name in names {
            assert!(ours[name] == expected[name], "{rule:?}: {name}");
        }
        // And everything else: the same model, whatever its form.
        let [ours, expected] = [&dir, &theirs].map(|dir| Checkpoint::open(dir).unwrap());
        assert_eq!((ours.form(), expected.form()), (Form::HuggingFace, form));
        assert_eq!(ours.fingerprint(&|_, _| ()), expected.fingerprint(&|_, _| ()), "{rule:?}");
        assert_eq!(ours.stop_sources(), expected.stop_sources());
        assert!(ours.lowest_codes() > 0, "data that tells the clamps apart");
    }
}

#[test]
fn the_default_rule_is_none_of_the_compressors() {
    let Some(fixtures) = fixtures() else { return };
    let out = tempfile::tempdir().unwrap();
    let made = Rule::ALL.map(|rule| {
        let dir = out.path().join(rule.name());
        let how = Quantization { rule, replace: false };
        quantize(&fixtures.join("qwen3-tiny-source"), &dir, &how, &mut |_, _| ()).unwrap();
        Checkpoint::open(&dir).unwrap()
    });
    assert_eq!(made[0].lowest_codes(), 0);
    let codes = |checkpoint: &Checkpoint| -> Vec<i8> {
        (0..3).flat_map(|layer| checkpoint.layer(layer).unwrap().w_up.iter().copied().collect::<Vec<_>>()).collect()
    };
    let ours = codes(&made[0]);
    for other in &made[1..] {
        let other = codes(other);
        assert!(ours != other && ours.iter().zip(other).all(|(a, b)| a.abs_diff(b) <= 1));
    }
}

#[test]
fn both_writers_of_a_configuration_are_understood() {
    let Some(fixtures) = fixtures() else { return };
    let from = fixtures.join("qwen3-tiny-w8a8/bf16-scale");
    let older = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(&from).unwrap() {
        let name = entry.unwrap().file_name();
        let into = match name.to_str().unwrap() {
            CONFIG_FILE => continue,
            "config.llmcompressor-0.5.1_transformers-4.51.3.json" => CONFIG_FILE,
            other => other,
        };
        fs::copy(from.join(&name), older.path().join(into)).unwrap();
    }
    let [newer, older] = [&from, older.path()].map(|dir| Checkpoint::open(dir).unwrap());
    assert_eq!((newer.geometry(), newer.rope_theta()), (older.geometry(), older.rope_theta()));
    assert_eq!(newer.fingerprint(&|_, _| ()), older.fingerprint(&|_, _| ()));
}
