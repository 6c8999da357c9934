//! Every rule of `docs/bundles.md` on a case file: broken once, it is refused with the file, the line and the
//! rule; and what is written is read back.

// Helpers outside test functions fail a test by panicking too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use cases::{Case, CaseError, Kernel, NewCase, Padding, Poison, PolicyRequest, new_case};
use proptest::prelude::*;
use reference::{Policy, Rounding, Site};

const DECODE: &str = include_str!("data/mini-active2-dirty.yaml");
const REPLICATED: &str = include_str!("data/mini-active1-poison.yaml");
const FULL: &str = include_str!("data/mini-full.yaml");
const TOKENS: &str = include_str!("data/mini-tokens2.yaml");

fn parse(text: &str) -> Result<Case, CaseError> {
    Case::parse(text, Path::new("bundle/case.yaml"))
}

/// `text` with its one `from` replaced.
fn change(text: &str, from: &str, to: &str) -> String {
    assert_eq!(text.matches(from).count(), 1, "{from:?} is not there once");
    text.replacen(from, to, 1)
}

/// Line of the one `marker` in `text`, from 1.
fn line_of(text: &str, marker: &str) -> usize {
    assert_eq!(text.matches(marker).count(), 1, "{marker:?} is not there once");
    text[..text.find(marker).unwrap()].matches('\n').count() + 1
}

/// Asserts that `text` is refused on the line that holds `marker`, in these words.
#[track_caller]
fn refused(text: &str, marker: &str, words: &[&str]) {
    let error = parse(text).expect_err(marker);
    let shown = error.to_string();
    assert_eq!(error.line(), Some(line_of(text, marker)), "{shown}");
    assert!(shown.starts_with(&format!("bundle/case.yaml:{}:", line_of(text, marker))), "{shown}");
    for word in words {
        assert!(shown.contains(word), "{word:?} is missing in: {shown}");
    }
    if let Some(span) = error.span() {
        assert!(error.source_text().get(span).is_some(), "{shown}");
    }
}

#[test]
fn the_samples_are_valid_and_read_back() {
    for text in [DECODE, REPLICATED, FULL, TOKENS] {
        let case = parse(text).unwrap();
        assert_eq!(parse(&case.to_yaml()).unwrap(), case, "{}", case.to_yaml());
        assert_eq!(case.warnings(), Vec::<String>::new());
    }
    let case = parse(DECODE).unwrap();
    assert_eq!((case.name.as_str(), case.padding, case.seed), ("mini/active2-dirty", Padding::Own, 101));
    assert_eq!(case.batch().unwrap().slots[..3], [4993, 3148, 8192]);
    assert_eq!(parse(REPLICATED).unwrap().poison, Some(Poison::KvBeyondContextNan));
    let Kernel::Tokens(tokens) = parse(TOKENS).unwrap().kernel else { panic!("tokens") };
    assert_eq!((tokens.prompts[1].len(), tokens.decode_steps, tokens.block_table.len()), (40, 48, 2));
}

#[test]
fn what_is_written_looks_like_the_samples() {
    // The decode samples are written in this program's own key order, so nothing at all differs.
    for text in [DECODE, REPLICATED, FULL] {
        assert_eq!(parse(text).unwrap().to_yaml(), text);
    }
}

#[test]
fn not_a_case_file() {
    let error = |text: &str| parse(text).unwrap_err().to_string();
    assert!(error("").contains("empty"), "{}", error(""));
    assert!(error("# nothing\n").starts_with("bundle/case.yaml"));
    for text in
        ["- 1\n- 2\n", "just words\n", "42\n", "[a, b", "a: b: c", "\t", "format: 1\n---\nformat: 1\n", "&a [*a]"]
    {
        assert!(error(text).starts_with("bundle/case.yaml"), "{text:?}: {}", error(text));
    }
    let deep = "[".repeat(200_000);
    assert!(error(&deep).starts_with("bundle/case.yaml"));
    let deep = format!("format: 1\nkernel: decode_layer\nname: {deep}");
    assert!(error(&deep).starts_with("bundle/case.yaml"));
    let bomb = "format: &a [x, x]\nkernel: &b [*a, *a]\nname: [*b, *b]\n";
    assert!(error(bomb).starts_with("bundle/case.yaml:1"));
}

#[test]
fn keys() {
    refused(&change(DECODE, "seed: 101", "seed: 101\nspeed: 3"), "speed", &["unknown key \"speed\""]);
    refused(
        &change(DECODE, "{recipe: int8_normal, std: 32}\n  wk:", "{recipe: int8_normal, std: 32, dev: 1}\n  wk:"),
        "dev:",
        &["unknown key \"dev\""],
    );
    refused(&change(DECODE, "phase: 37,", "phase: 37, shape: 2,"), "shape", &["unknown key \"shape\""]);
    refused(&change(DECODE, "noise: {exp_ulp: 1}", "noise: {exp_ulp: 1, log_ulp: 1}"), "log_ulp", &["unknown key"]);
    refused(&change(DECODE, "kind: emulated", "kind: emulated\n  vendor: x"), "vendor", &["unknown key"]);
    refused(
        &change(REPLICATED, "{kv_beyond_context: nan}", "{kv_beyond_context: nan, kv: 1}"),
        "kv: 1",
        &["unknown key"],
    );
    for key in [
        "format: 1",
        "name: mini/active2-dirty",
        "kernel: decode_layer",
        "geometry: mini",
        "layers: 1",
        "seed: 101",
        "max_seq: 512",
        "pages: 68",
        "rope_theta: 1000000.0",
        "active_batch: 2",
        "padding: own",
    ] {
        let text = change(DECODE, &format!("{key}\n"), "");
        let name = key.split(':').next().unwrap();
        let error = parse(&text).unwrap_err();
        assert!(error.to_string().contains(&format!("missing key {name:?}")), "{error}");
        // Those two decide how the rest is read, and are missed by the parser itself.
        assert!(["format", "kernel"].contains(&name) || error.line() == Some(line_of(&text, "kernel:")), "{error}");
    }
    for (from, key) in [
        ("seq_lens: [130, 77, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n", "seq_lens"),
        (
            "slot_mapping: [4993, 3148, 8192, 8193, 8194, 8195, 8196, 8197, 8198, 8199, 8200, 8201, 8202, 8203, 8204, 8205]\n",
            "slot_mapping",
        ),
    ] {
        let error = parse(&change(DECODE, from, "")).unwrap_err().to_string();
        assert!(error.contains(&format!("missing key {key:?}")), "{error}");
    }
    refused(&change(DECODE, "seed: 101\n", "seed: 101\nseed: 102\n"), "seed: 102", &["twice"]);
    refused(&change(DECODE, "  wk: {", "  wq: {recipe: zeros}\n  wk: {"), "wq: {recipe: zeros}", &["twice"]);
    refused(&change(DECODE, "std: 1.0, outlier", "std: 1.0, std: 2.0, outlier"), "std: 2.0", &["twice"]);
}

#[test]
fn header() {
    refused(&change(DECODE, "format: 1", "format: 2"), "format: 2", &["format", "format 1"]);
    refused(&change(DECODE, "kernel: decode_layer", "kernel: prefill"), "kernel: prefill", &["prefill", "reserved"]);
    refused("format: 1\nkernel: prefill\nchunks: 3\n", "kernel: prefill", &["prefill", "reserved"]);
    refused(&change(DECODE, "kernel: decode_layer", "kernel: encode"), "kernel: encode", &["encode", "decode_layer"]);
    refused(&change(DECODE, "name: mini/active2-dirty", "name: ''"), "name: ''", &["name"]);
    refused(&change(DECODE, "name: mini/active2-dirty", "name: \"a\\u0007b\""), "name: \"a", &["printable"]);
}

#[test]
fn types() {
    refused(&change(DECODE, "layers: 1", "layers: one"), "layers: one", &["a whole number", "\"one\""]);
    refused(&change(DECODE, "layers: 1", "layers: 1.5"), "layers: 1.5", &["a whole number", "1.5"]);
    refused(&change(DECODE, "seed: 101", "seed: -1"), "seed: -1", &[]);
    refused(&change(DECODE, "seed: 101", "seed: 18446744073709551616"), "seed: 18446744073709551616", &[]);
    refused(&change(DECODE, "seq_lens: [130,", "seq_lens: [[130],"), "seq_lens", &[]);
    refused(&change(DECODE, "  - [24, 52, 35, 18]", "  - 24"), "  - 24", &["expected a list"]);
    refused(&change(DECODE, "  - [24, 52, 35, 18]", "  - [24, 52, true, 18]"), "52, true", &[]);
    refused(
        &change(DECODE, "  wq: {recipe: int8_normal, std: 32}", "  wq: int8_normal"),
        "wq: int8_normal",
        &["expected a mapping"],
    );
    refused(&change(DECODE, "geometry: mini", "geometry: [mini]"), "geometry: [mini]", &["a name or a mapping"]);
    assert_eq!(parse(&change(DECODE, "seed: 101", "seed: 18446744073709551615")).unwrap().seed, u64::MAX);
}

/// `DECODE` with a spelled-out geometry, in which `from` is replaced.
fn spelled(from: &str, to: &str) -> String {
    let sizes = "geometry:\n  hidden_size: 2560\n  num_attention_heads: 20\n  num_key_value_heads: 4\n  head_dim: 128\n  \
                 intermediate_size: 2048\n  num_hidden_layers: 4\n  vocab_size: 3840\n  real_vocab_size: 3800\n";
    change(DECODE, "geometry: mini\n", &change(sizes, from, to))
}

#[test]
fn geometries() {
    let case = parse(&spelled("head_dim: 128", "head_dim: 128")).unwrap();
    assert_eq!((case.geometry_name.clone(), &case.geometry), (None, &parse(DECODE).unwrap().geometry));
    assert_eq!(parse(&case.to_yaml()).unwrap(), case);
    refused(&change(DECODE, "geometry: mini", "geometry: maxi"), "geometry: maxi", &["maxi", "14b"]);
    for (from, to) in [
        ("head_dim: 128", "head_dim: 127"),
        ("head_dim: 128", "head_dim: 0"),
        ("hidden_size: 2560", "hidden_size: -2560"),
        ("hidden_size: 2560", "hidden_size: 99999999"),
        ("num_attention_heads: 20", "num_attention_heads: 21"),
        ("intermediate_size: 2048", "intermediate_size: 2047"),
        ("real_vocab_size: 3800", "real_vocab_size: 3841"),
        ("real_vocab_size: 3800", "real_vocab_size: 3800\n  rms_norm_eps: 0.0"),
        ("real_vocab_size: 3800", "real_vocab_size: 3800\n  rms_norm_eps: .nan"),
        ("real_vocab_size: 3800", "real_vocab_size: 3800\n  depth: 1"),
    ] {
        refused(&spelled(from, to), to.trim_start_matches("real_vocab_size: 3800\n  "), &[]);
    }
    let error = parse(&spelled("  head_dim: 128\n", "")).unwrap_err().to_string();
    assert!(error.contains("missing key \"head_dim\""), "{error}");
}

#[test]
fn sizes() {
    refused(&change(DECODE, "layers: 1", "layers: 5"), "layers: 5", &["layers: 5", "1..=4", "num_hidden_layers"]);
    refused(&change(DECODE, "layers: 1", "layers: 0"), "layers: 0", &["1..=4"]);
    refused(&change(DECODE, "max_seq: 512", "max_seq: 0"), "max_seq: 0", &["max_seq"]);
    refused(&change(DECODE, "max_seq: 512", "max_seq: 9999999999"), "max_seq: 9", &["max_seq"]);
    refused(&change(DECODE, "pages: 68", "pages: 0"), "pages: 0", &["pages"]);
    refused(&change(DECODE, "pages: 68", "pages: 9223372036854775807"), "pages: 9", &["pages"]);
    refused(&change(DECODE, "pages: 68", "pages: 1000000"), "pages: 1000000", &["GiB", "k_cache"]);
    for theta in ["0.0", "-1.0", ".inf", ".nan"] {
        let text = change(DECODE, "rope_theta: 1000000.0", &format!("rope_theta: {theta}"));
        refused(&text, "rope_theta: ", &["rope_theta", "positive"]);
    }
}

#[test]
fn recipes() {
    let wq = "  wq: {recipe: int8_normal, std: 32}";
    let k = "  k_cache: {recipe: normal, mean: 0.0, std: 1.0}";
    refused(&change(DECODE, wq, &format!("{wq}\n  wz: {{recipe: zeros}}")), "wz", &["no tensor \"wz\""]);
    refused(&change(DECODE, wq, &format!("{wq}\n  embed_tokens: {{recipe: zeros}}")), "embed_tokens", &["no tensor"]);
    refused(&change(DECODE, wq, &format!("{wq}\n  rope_cos: {{recipe: zeros}}")), "rope_cos: {", &["rope_theta"]);
    refused(&change(TOKENS, wq, &format!("{wq}\n  hidden_states: {{recipe: zeros}}")), "hidden_states", &["no tensor"]);
    let error = parse(&change(DECODE, &format!("{k}\n"), "")).unwrap_err();
    assert!(error.to_string().contains("no recipe for k_cache") && error.line() == Some(10), "{error}");
    for (from, to, words) in [
        (wq, "  wq: {recipe: normal, mean: 0.0, std: 1.0}", "INT8"),
        (wq, "  wq: {recipe: int8_normal, std: 1.5}", "whole"),
        (wq, "  wq: {recipe: int8_normal, std: -1}", "whole"),
        (wq, "  wq: {recipe: int8_normal, std: 100000}", "4096"),
        (wq, "  wq: {recipe: int8_normal}", "missing key \"std\""),
        (wq, "  wq: {recipe: int8_normal, std: 32, mean: 1.0}", "unknown key \"mean\""),
        (wq, "  wq: {recipe: constant, value: 1.5}", "INT8"),
        (wq, "  wq: {recipe: gaussian}", "gaussian"),
        (wq, "  wq: {std: 32}", "missing key \"recipe\""),
        (k, "  k_cache: {recipe: int8_normal, std: 32}", "BF16"),
        (k, "  k_cache: {recipe: normal, mean: .nan, std: 1.0}", "finite"),
        (k, "  k_cache: {recipe: normal, mean: 0.0, std: .inf}", "finite"),
        (k, "  k_cache: {recipe: normal, mean: 0.0, std: -1.0}", "below 0"),
        (k, "  k_cache: {recipe: normal, mean: 0.0, std: 1.0e+38}", "BF16"),
        (k, "  k_cache: {recipe: uniform, lo: 1.0, hi: 0.0}", "above"),
        (k, "  k_cache: {recipe: zeros, value: 1.0}", "unknown key \"value\""),
        (k, "  k_cache: {recipe: ones, outlier_columns: {period: 4, phase: 4, factor: 2.0}}", "phase"),
        (k, "  k_cache: {recipe: ones, outlier_columns: {period: 0, phase: 0, factor: 2.0}}", "period"),
        (k, "  k_cache: {recipe: ones, outlier_columns: {period: 4, phase: -1, factor: 2.0}}", "phase"),
        (k, "  k_cache: {recipe: ones, outlier_columns: {period: 4, phase: 0, factor: 3.0}}", "power of two"),
    ] {
        refused(&change(DECODE, from, to), to, &[words]);
    }
}

#[test]
fn batch_metadata() {
    for active in ["0", "17", "-1"] {
        let line = format!("active_batch: {active}");
        refused(&change(DECODE, "active_batch: 2", &line), &line, &["active_batch", "1..=16"]);
    }
    refused(
        &change(DECODE, "seq_lens: [130, 77, 1,", "seq_lens: [130, 77,"),
        "seq_lens",
        &["15 entries", "expected 16"],
    );
    refused(&change(DECODE, "seq_lens: [130, 77,", "seq_lens: [0, 77,"), "seq_lens", &["seq_lens[0]: 0", "1..=512"]);
    refused(
        &change(DECODE, "seq_lens: [130, 77,", "seq_lens: [130, 513,"),
        "seq_lens",
        &["seq_lens[1]: 513", "max_seq"],
    );
    refused(&change(DECODE, "seq_lens: [130, 77, 1,", "seq_lens: [130, 77, 0,"), "seq_lens", &["seq_lens[2]: 0"]);
    let row = "  - [24, 52, 35, 18]";
    refused(&change(DECODE, &format!("{row}\n"), ""), "block_table:", &["15 rows", "expected 16"]);
    refused(
        &change(DECODE, row, "  - [24, 52, 35]"),
        "  - [24, 52, 35]",
        &["block_table[1]", "3 entries", "expected 4"],
    );
    refused(&change(DECODE, row, "  - [24, 52, 35, 18, 19]"), "18, 19", &["block_table[1]", "5 entries"]);
    refused(
        &change(DECODE, row, "  - [24, 52, 35, 68]"),
        "35, 68",
        &["block_table[1][3]", "page 68", "outside the cache", "0..=67"],
    );
    refused(&change(DECODE, row, "  - [24, 52, 35, -2]"), "35, -2", &["page -2"]);
    refused(&change(DECODE, row, "  - [24, 52, 35, 4294967320]"), "4294967320", &["page 4294967320"]);
    refused(
        &change(DECODE, row, "  - [-1, 52, 35, 18]"),
        "[-1",
        &["block_table[1][0]: -1 inside the context of row 1"],
    );
    refused(&change(DECODE, "  - [14, 39, 45, 62]", "  - [14, -1, 45, 62]"), "14, -1", &["block_table[0][1]"]);
    refused(
        &change(DECODE, "slot_mapping: [4993, 3148, 8192,", "slot_mapping: [4993, 3148,"),
        "slot_mapping",
        &["15 entries"],
    );
    refused(
        &change(DECODE, "slot_mapping: [4993, 3148,", "slot_mapping: [4993, 204,"),
        "slot_mapping",
        &["slot_mapping[1]: slot 204 is page 1 offset 76, but position 76 of row 1 lies in page 24", "(slot 3148)"],
    );
    refused(&change(DECODE, "8204, 8205]", "8204, 8704]"), "slot_mapping", &["slot_mapping[15]: 8704", "0..=8703"]);
    refused(&change(DECODE, "8204, 8205]", "8204, -1]"), "slot_mapping", &["slot_mapping[15]: -1"]);
    // Row 1 is given row 0's context: both write the same slot.
    let same = change(&change(DECODE, row, "  - [14, 39, 35, 18]"), "seq_lens: [130, 77,", "seq_lens: [130, 130,");
    let same = change(&same, "slot_mapping: [4993, 3148,", "slot_mapping: [4993, 4993,");
    refused(&same, "slot_mapping", &["active rows 0 and 1 both write slot 4993"]);
    // Unused entries may be -1, and padding rows may have no page at all.
    assert!(parse(&change(DECODE, row, "  - [24, -1, -1, -1]")).is_ok());
    assert!(parse(&DECODE.replace("[64, 64, 64, 64]", "[-1, -1, -1, -1]")).is_ok());
}

#[test]
fn the_column_of_a_value_is_named() {
    let error = parse(&change(DECODE, "slot_mapping: [4993, 3148,", "slot_mapping: [4993, 204,")).unwrap_err();
    assert_eq!(error.column(), Some("slot_mapping: [4993, ".len() + 1));
    assert_eq!(&error.source_text()[error.span().unwrap()], "204");
    assert!(error.help().unwrap().contains("3148"));
}

#[test]
fn keys_of_the_other_kernel() {
    refused(&change(DECODE, "padding: own", "padding: own\ndecode_steps: 3"), "decode_steps: 3", &["decode_steps"]);
    refused(&change(DECODE, "padding: own", "padding: own\nprompts:\n  - [1]"), "prompts:", &["prompts"]);
    refused(&change(TOKENS, "decode_steps: 48", "decode_steps: 48\nseq_lens: [1]"), "seq_lens", &["seq_lens"]);
    refused(
        &change(TOKENS, "decode_steps: 48", "decode_steps: 48\nslot_mapping: [1]"),
        "slot_mapping",
        &["slot_mapping"],
    );
    let poisoned = change(TOKENS, "decode_steps: 48", "decode_steps: 48\npoison: {kv_beyond_context: nan}");
    refused(&poisoned, "poison: {", &["poison"]);
}

#[test]
fn words() {
    refused(&change(DECODE, "padding: own", "padding: zero"), "padding: zero", &["padding", "replicate_row0"]);
    refused(&change(TOKENS, "padding: replicate_row0", "padding: own"), "padding: own", &["padding"]);
    assert_eq!(
        parse(&change(FULL, "padding: own", "padding: replicate_row0")).unwrap().padding,
        Padding::ReplicateRow0
    );
    refused(&change(REPLICATED, "nan}", "zero}"), "zero}", &["zero", "nan"]);
    refused(&change(DECODE, "kind: emulated", "kind: gpu"), "kind: gpu", &["gpu", "npu"]);
    refused(&change(DECODE, "exp_ulp: 1", "exp_ulp: -1"), "exp_ulp: -1", &["exp_ulp"]);
    // Revisions that a YAML reader could take for numbers stay text.
    let device = |revision| parse(&change(DECODE, "5b8ce4d6", revision)).unwrap().device.unwrap();
    assert_eq!(device("12345678").kernel_revision.unwrap(), "12345678");
    assert_eq!(device("1e100000").kernel_revision.unwrap(), "1e100000");
}

#[test]
fn policies() {
    let with = |policy: &str| change(DECODE, "padding: own", &format!("padding: own\npolicy: {policy}"));
    let none = parse(DECODE).unwrap();
    assert_eq!((none.policy, none.policy_in_case), (PolicyRequest::Auto, false));
    let rne = parse(&with("rne")).unwrap();
    assert_eq!((&rne.policy, rne.policy_in_case), (&PolicyRequest::Rne, true));
    let custom = parse(&with("{out: rne, prob: none}")).unwrap();
    let expected = Policy::production().with(Site::Out, Rounding::Rne).with(Site::Prob, Rounding::None);
    assert_eq!(custom.policy, PolicyRequest::Custom(expected));
    for case in [rne, custom] {
        assert_eq!(parse(&case.to_yaml()).unwrap(), case);
    }
    refused(&with("even"), "policy: even", &["even"]);
    refused(&with("{outs: rne}"), "policy: {", &["outs"]);
    refused(&with("{out: none}"), "policy: {", &["stored"]);
    refused(&with("{out: up}"), "policy: {", &["up"]);
    refused(&with("[rne]"), "policy: [", &[]);
}

#[test]
fn hashes() {
    let hash = "863b79c1e70e883ad126979baa2c7d9b96830ff5362310094592c276d53ca231";
    refused(&change(DECODE, hash, &hash[1..]), &hash[1..], &["inputs_sha256: wq", "64"]);
    refused(&change(DECODE, hash, &hash.replace('8', "g")), "g63b", &["inputs_sha256: wq"]);
    refused(&change(DECODE, hash, &format!("{hash}\n  wz: {hash}")), "wz", &["no tensor \"wz\""]);
    refused(&change(DECODE, "{k_cache: b2d3", "{wq: b2d3"), "{wq: b2d3", &["final_cache_sha256"]);
    refused(&change(DECODE, "{k_cache: b2d3", "{k_cache: zzd3"), "zzd3", &["final_cache_sha256: k_cache"]);
    let upper = parse(&change(DECODE, hash, &hash.to_uppercase())).unwrap();
    assert_eq!(upper, parse(DECODE).unwrap());
}

#[test]
fn tokens() {
    let first = "  - [1737, 3634, 2096, 3134, 960, 1784, 1069, 2677, 1917, 942, 802, 687, 824, 3163, 536, 2412, 1710, 936, 1935, 1601, 3791]\n";
    refused(&change(TOKENS, first, ""), "prompts:", &["1 prompts", "expected 2"]);
    refused(&change(TOKENS, first, "  - []\n"), "  - []", &["prompts[0]: 0 tokens"]);
    refused(&change(TOKENS, "[1737,", "[3800,"), "[3800,", &["prompts[0][0]: 3800", "real vocabulary"]);
    refused(&change(TOKENS, "[1737,", "[-1,"), "[-1,", &["prompts[0][0]: -1"]);
    refused(&change(TOKENS, "decode_steps: 48", "decode_steps: 512"), "decode_steps: 512", &["decode_steps"]);
    refused(
        &change(TOKENS, "decode_steps: 48", "decode_steps: 480"),
        "  - [298,",
        &["prompts[1]: 40 tokens", "1..=32"],
    );
    refused(&change(TOKENS, "decode_steps: 48\n", ""), "kernel: ", &["missing key \"decode_steps\""]);
    refused(&change(TOKENS, "  - [24, 52, 35, 18]\n", ""), "block_table:", &["1 rows", "active_batch"]);
    refused(&change(TOKENS, "  - [24, 52, 35, 18]", "  - [-1, 52, 35, 18]"), "[-1, 52", &["block_table[1][0]: -1"]);
    refused(
        &change(TOKENS, "  - [24, 52, 35, 18]", "  - [14, 52, 35, 18]"),
        "  - [14, 52",
        &["page 14 already holds block 0 of row 0"],
    );
    let longer = change(TOKENS, "decode_steps: 48", "decode_steps: 108");
    assert!(
        parse(&change(&longer, "  - [14, 39, 45, 62]", "  - [14, -1, 45, 62]")).is_err(),
        "129 positions need two pages"
    );
    assert!(parse(&change(TOKENS, "  - [24, 52, 35, 18]", "  - [24, -1, -1, -1]")).is_ok());
    assert!(parse(&change(TOKENS, "decode_steps: 48", "decode_steps: 0")).is_ok());
}

#[test]
fn files() {
    let directory = tempfile::tempdir().unwrap();
    let error = Case::load(directory.path()).unwrap_err();
    assert!(error.to_string().contains("case.yaml: cannot read the file"), "{error}");
    let file = directory.path().join("case.yaml");
    std::fs::write(&file, DECODE).unwrap();
    let case = Case::load(directory.path()).unwrap();
    assert_eq!((&case.path, case.directory()), (&file, directory.path()));
    assert_eq!(Case::load(&file).unwrap(), case);
    std::fs::write(&file, [0xFF, 0xFE, 0x00]).unwrap();
    assert!(Case::load(&file).unwrap_err().to_string().contains("UTF-8"));
}

#[test]
fn new_cases_are_built_like_the_samples() {
    let mini = || NewCase::named("mini/full", "mini").unwrap();
    let bare = |text: &str| {
        let mut case = parse(text).unwrap();
        (case.device, case.path) = (None, "case.yaml".into());
        case.inputs_sha256.clear();
        case.final_cache_sha256.clear();
        case
    };
    let lens = vec![1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 130, 200, 255, 256];
    let full = new_case(NewCase { active_batch: 16, seq_lens: lens, ..mini() }).unwrap();
    assert_eq!(full, bare(FULL));
    let dirty = NewCase {
        name: "mini/active2-dirty".to_owned(),
        active_batch: 2,
        seq_lens: vec![130, 77],
        padding: Padding::Own,
        ..mini()
    };
    assert_eq!(new_case(dirty.clone()).unwrap(), bare(DECODE));
    let poison = Some(Poison::KvBeyondContextNan);
    let poisoned = NewCase { name: "mini/active1-poison".to_owned(), seq_lens: vec![200], poison, ..mini() };
    assert_eq!(new_case(poisoned).unwrap(), bare(REPLICATED));

    for (faulty, words) in [
        (NewCase { seq_lens: vec![1], ..dirty.clone() }, "1 context lengths for 2 active rows"),
        (NewCase { seq_lens: vec![130, 513], ..dirty.clone() }, "seq_lens[1]: 513"),
        (NewCase { seq_lens: vec![130, 0], ..dirty.clone() }, "seq_lens[1]: 0"),
        (NewCase { pages: Some(64), ..dirty.clone() }, "64 pages"),
        (NewCase { layers: 9, ..dirty.clone() }, "layers: 9"),
        (NewCase { max_seq: usize::MAX, ..dirty.clone() }, "max_seq"),
    ] {
        let error = new_case(faulty).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

proptest! {
    #[test]
    fn generated_cases_are_read_back(
        seed in any::<u64>(),
        seq_lens in prop::collection::vec(1..=512_usize, 1..=16),
        own in any::<bool>(),
        named in any::<bool>(),
        poisoned in any::<bool>(),
        name in "[a-zA-Z0-9 /:#'\"\\\\-]{1,12}",
    ) {
        prop_assume!(!name.trim().is_empty());
        let mini = NewCase::named(&name, "mini").unwrap();
        let case = new_case(NewCase {
            seed,
            active_batch: seq_lens.len(),
            seq_lens,
            padding: if own { Padding::Own } else { Padding::ReplicateRow0 },
            poison: poisoned.then_some(Poison::KvBeyondContextNan),
            geometry_name: named.then(|| "mini".to_owned()),
            ..mini
        }).unwrap();
        prop_assert_eq!(&case.name, &name);
        prop_assert_eq!(Case::parse(&case.to_yaml(), &case.path).unwrap(), case);
    }

    /// Whatever is cut out of a case file or put into it, reading it ends with a case or an error that
    /// points into the text.
    #[test]
    fn damaged_files_are_errors(at in 0..DECODE.len(), length in 0..40_usize, put in "[ -~\n]{0,6}") {
        let end = (at + length).min(DECODE.len());
        let text = format!("{}{put}{}", &DECODE[..at], &DECODE[end..]);
        if let Err(error) = parse(&text) {
            prop_assert!(!error.message().is_empty());
            if let Some(span) = error.span() {
                prop_assert!(text.get(span).is_some());
            }
            if let Some(line) = error.line() {
                prop_assert!(line <= text.lines().count() + 1);
            }
        }
    }
}

/// A case whose kernel can be launched.
fn launchable() -> String {
    let kernel = "kind: npu
  kernel_revision: 1234abcd
  kernel:
    binary: kernels/decode.o
    function: decode_layer
    blocks: 24
    arguments:
      - hidden_states
      - k_cache
      - seq_lens
      - {int32: active_batch}
      - {int64: -3}
      - {float32: 1.0e-6}
      - {workspace: 4096, zero: true}
      - {workspace: 512}
      - attn_out
      - out";
    change(DECODE, "kind: emulated\n  kernel_revision: 5b8ce4d6\n  noise: {exp_ulp: 1}", kernel)
}

#[test]
fn a_kernel_to_launch_is_read_and_written_back() {
    let case = parse(&launchable()).unwrap();
    assert_eq!(case.to_yaml(), launchable());
    let launch = case.device.unwrap().kernel.unwrap();
    assert_eq!(
        (launch.binary.as_str(), launch.function.as_str(), launch.blocks),
        ("kernels/decode.o", "decode_layer", 24)
    );
    let names: Vec<_> = launch.arguments.iter().filter_map(cases::Argument::name).collect();
    assert_eq!(names, ["hidden_states", "k_cache", "seq_lens", "attn_out", "out"]);
    assert_eq!(launch.arguments[6], cases::Argument::Workspace { bytes: 4096, zero: true });
}

#[test]
fn a_kernel_that_cannot_be_launched_as_described() {
    let text = launchable();
    for (from, to, marker, words) in [
        ("kind: npu", "kind: emulated", "binary:", "of kind npu"),
        ("blocks: 24", "blocks: 0", "blocks: 0", "outside 1..=65535"),
        ("blocks: 24", "blocks: 24\n    grid: 1", "grid", "unknown key \"grid\""),
        ("function: decode_layer", "function: decode layer", "function: ", "without spaces"),
        ("binary: kernels/decode.o", "binary: \"\"", "binary: ", "printable text"),
        (
            "- attn_out",
            "- attn_outt",
            "attn_outt",
            "arguments[8]: no tensor is named \"attn_outt\"; the tensors are hidden",
        ),
        ("- attn_out", "- k_written_rows", "k_written_rows", "name k_cache and v_cache"),
        ("- attn_out", "- hidden_states", "- hidden_states\n      - out", "is arguments[0] already"),
        ("{int64: -3}", "{int32: 4294967296}", "4294967296", "arguments[4]: 4294967296 is no int32"),
        ("{int64: -3}", "{uint64: -3}", "-3", "-3 is no uint64"),
        ("{int64: -3}", "{int64: 1.5}", "1.5", "1.5 is no int64"),
        ("{int64: -3}", "{int64: layers}", "{int64: layers}", "\"layers\" is no int64"),
        ("{int64: -3}", "{int64: 3, int32: 3}", "{int64: 3", "more than one value"),
        ("{int64: -3}", "{int64: 3, zero: true}", "{int64: 3", "about a workspace"),
        ("{int64: -3}", "{zero: true}", "{zero: true}", "neither a scalar nor a workspace"),
        ("{int64: -3}", "{int128: 3}", "int128", "unknown key \"int128\""),
        ("{workspace: 512}", "{workspace: 0}", "{workspace: 0}", "outside 1..="),
    ] {
        refused(&change(&text, from, to), marker, &[words]);
    }
    let none = text.replace("      - attn_out\n      - out\n", "").replace("      - k_cache\n", "");
    assert!(parse(&none).unwrap_err().to_string().contains("nothing to judge"));
    let empty = change(&text, "    arguments:", "    arguments: []\n    more:");
    assert!(parse(&empty).is_err());
    let token = "device:\n  kind: npu\n  kernel: {binary: a, function: f, blocks: 1, arguments: [out]}\n";
    let at = TOKENS.find("device:").unwrap();
    let rest = TOKENS[at..].find("inputs_sha256:").unwrap();
    let text = format!("{}{token}{}", &TOKENS[..at], &TOKENS[at + rest..]);
    refused(&text, "binary: a", &["only kernel decode_layer"]);
}
