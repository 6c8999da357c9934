//! Quantization of whole checkpoints, against the rules channel by channel; and what is refused.

use serde_json::json;

use super::super::config::quantization_config;
use super::*;

/// A BF16 checkpoint: the codes of [`Edit::new`] times their scales.
fn source() -> Edit {
    let mut edit = Edit::new();
    let scales: Vec<String> = edit.tensors.keys().filter(|name| name.ends_with("_scale")).cloned().collect();
    for name in scales {
        let (_, _, scale) = edit.tensors.remove(&name).unwrap();
        let scale: Vec<f32> = scale.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect();
        let (dtype, shape, codes) = edit.tensors.get_mut(name.trim_end_matches("_scale")).unwrap();
        let value = |(index, code): (usize, &u8)| bf16::from_f32(f32::from(*code as i8) * scale[index / shape[1]]);
        *codes = codes.iter().enumerate().flat_map(|pair| value(pair).to_le_bytes()).collect();
        *dtype = Dtype::BF16;
    }
    edit.config(|config| drop(config.as_object_mut().unwrap().shift_remove("quantization_config")));
    edit.write();
    edit
}

fn quantized(source: &Edit, dir: &Path, rule: Rule) -> Result<Checkpoint, String> {
    let quantization = Quantization { rule, replace: false };
    quantize(source.dir.path(), dir, &quantization, &mut |_, _| ()).map_err(|error| error.to_string())?;
    Ok(Checkpoint::open(dir).unwrap())
}

#[test]
fn every_channel_follows_the_rule_and_everything_else_is_copied() {
    let source = source();
    source.config(|config| config["some_key"] = json!("kept"));
    fs::write(source.path("tokenizer.json"), "{}").unwrap();
    let out = tempfile::tempdir().unwrap();
    let mut fingerprints = Vec::new();
    for rule in Rule::ALL {
        let checkpoint = quantized(&source, &out.path().join(rule.name()), rule).unwrap();
        assert_eq!(checkpoint.remarks(), Edit::new().open().remarks());
        let layer = checkpoint.layer(1).unwrap();
        let weights: Vec<bf16> =
            source.tensors[Q].2.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes)).collect();
        for (row, weights) in weights.chunks(64).enumerate() {
            let mut codes = vec![0; 64];
            let scale = rule.quantize(weights, &mut codes).unwrap();
            assert_eq!((layer.wq.column(row).to_vec(), layer.wq_scale[row]), (codes, scale), "{rule:?} {row}");
        }
        let types: Vec<String> =
            checkpoint.tensors().filter(|tensor| tensor.name.ends_with("_scale")).map(|tensor| tensor.dtype).collect();
        assert!(types.iter().all(|dtype| *dtype == rule.scale_type().to_string()), "{types:?}");
        let embedding: Vec<u8> = checkpoint.embed_tokens().iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(embedding, source.tensors[EMBEDDING].2);
        assert_eq!(checkpoint.stop_ids(), [49, 48]);
        let config = fs::read_to_string(checkpoint.dir().join(CONFIG_FILE)).unwrap();
        assert!(config.contains("\"some_key\": \"kept\""), "{config}");
        assert_eq!(fs::read(checkpoint.dir().join("tokenizer.json")).unwrap(), b"{}");
        fingerprints.push(checkpoint.fingerprint(&|_, _| ()));
    }
    fingerprints.sort_unstable();
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), Rule::ALL.len(), "each rule gives other numbers");
}

#[test]
fn shards_odd_addresses_and_ties_of_the_source_change_nothing() {
    let mut source = source();
    let out = tempfile::tempdir().unwrap();
    let single = quantized(&source, &out.path().join("a"), Rule::Float32).unwrap().fingerprint(&|_, _| ());
    fs::write(source.path(SINGLE_FILE), source.file(|_| true, 1)).unwrap();
    let odd = quantized(&source, &out.path().join("b"), Rule::Float32).unwrap();
    assert_eq!(odd.fingerprint(&|_, _| ()), single);
    source.shard();
    let sharded = quantized(&source, &out.path().join("c"), Rule::Float32).unwrap();
    assert_eq!(sharded.fingerprint(&|_, _| ()), single);
    // A tied head is the embedding; one that is not used is not copied.
    fs::remove_file(source.path(INDEX_FILE)).unwrap();
    source.write();
    source.config(|config| config["tie_word_embeddings"] = true.into());
    let tied = quantized(&source, &out.path().join("d"), Rule::Float32).unwrap();
    assert_eq!(tied.head_source(), HeadSource::Tied);
    source.tensors.remove(HEAD);
    source.write();
    let absent = quantized(&source, &out.path().join("e"), Rule::Float32).unwrap();
    assert_eq!(absent.fingerprint(&|_, _| ()), tied.fingerprint(&|_, _| ()));
}

#[test]
fn a_weight_without_a_code_is_refused_by_place_and_leaves_nothing() {
    for (bits, told) in [(0x7FC1u16, "NaN"), (0xFF80, "-inf")] {
        let mut source = source();
        source.tensors.get_mut(Q).unwrap().2[2 * (5 * 64 + 7)..][..2].copy_from_slice(&bits.to_le_bytes());
        source.write();
        let out = tempfile::tempdir().unwrap();
        let refused = quantized(&source, &out.path().join("m"), Rule::Float32).unwrap_err();
        assert!(refused.starts_with(&source.path(SINGLE_FILE).display().to_string()), "{refused}");
        assert!(refused.contains(&format!("`{Q}`: [5, 7] is {told}")), "{refused}");
        assert!(contents(out.path()).is_empty());
    }
}

#[test]
fn what_is_no_bf16_checkpoint_is_refused() {
    let out = tempfile::tempdir().unwrap();
    let dir = out.path().join("m");
    let refused = |source: &Edit, parts: &[&str]| {
        let message = quantized(source, &dir, Rule::Float32).unwrap_err();
        for part in parts {
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
        assert!(!dir.exists());
    };
    refused(&Edit::new(), &[CONFIG_FILE, "quantization_config: is there", "quantized already"]);
    let bf16 = source();
    fs::write(bf16.path(DESCRIPTION_FILE), "{}").unwrap();
    refused(&bf16, &[DESCRIPTION_FILE, "quantized already"]);
    type Change = fn(&mut BTreeMap<String, Stored>);
    let cases: [(Change, &[&str]); 6] = [
        (|t| t.put(Q, Dtype::I8, &[64, 64]), &[Q, "type I8", "is BF16"]),
        (|t| t.put(Q, Dtype::F32, &[64, 64]), &[Q, "type F32", "is BF16"]),
        (|t| t.put(Q, Dtype::BF16, &[32, 64]), &[Q, "[32, 64]", "[64, 64]"]),
        (|t| t.put(Q_SCALE, Dtype::F32, &[64, 1]), &[Q_SCALE, "is a scale", "declares no quantization"]),
        (|t| drop(t.remove(Q)), &[Q, "in no shard"]),
        (|t| t.put("extra", Dtype::F32, &[1]), &["`extra`", "a Qwen3 checkpoint has no tensor"]),
    ];
    for (change, parts) in cases {
        let mut source = source();
        change(&mut source.tensors);
        source.write();
        refused(&source, parts);
    }
    // A source is no model that is computed.
    source().is_refused(CONFIG_FILE, &["quantization_config", "model quantize"]);
}

#[test]
fn the_source_and_what_is_in_the_way_stay_as_they_are() {
    let source = source();
    let before = contents(source.dir.path());
    let here = Quantization { rule: Rule::Float32, replace: true };
    let refused = quantize(source.dir.path(), source.dir.path(), &here, &mut |_, _| ()).unwrap_err();
    assert!(matches!(refused, QuantizeError::SameDirectory(_)), "{refused}");
    let old = synthesized(small(), 3);
    let kept = contents(old.path());
    let refused = quantized(&source, old.path(), Rule::Float32).unwrap_err();
    assert!(refused.contains("is not empty"), "{refused}");
    assert_eq!(contents(old.path()), kept);
    let (mut last, mut calls) = ((0, 0), 0);
    let mut look = |written, total| {
        (last, calls) = ((written, total), calls + 1);
        assert!(Checkpoint::open(old.path()).is_ok());
    };
    quantize(source.dir.path(), old.path(), &here, &mut look).unwrap();
    assert!(last.0 == last.1 && calls > 20, "{last:?}");
    assert_eq!(contents(source.dir.path()), before);
    assert_ne!(contents(old.path()), kept);
}

#[test]
fn the_scheme_that_is_written_is_the_one_that_is_read() {
    let edit = Edit::new();
    edit.config(|config| assert_eq!(config["quantization_config"], quantization_config()));
}
