//! The Ascend compressor's form: it reads like Hugging Face's, and is refused where its description and its tensors
//! disagree.

use serde_json::{Value, json};

use super::super::ascend::{INDEX_FILE, SINGLE_FILE};
use super::*;

const SHARD: &str = "quant_model_weights-00001-of-00001.safetensors";
const OFFSET: &str = "model.layers.1.self_attn.q_proj.weight_offset";

/// The checkpoint of [`Edit::new`] as the Ascend compressor would write it.
fn ascend() -> (Edit, Value) {
    let mut edit = Edit::new();
    let scales: Vec<String> = edit.tensors.keys().filter(|name| name.ends_with("_scale")).cloned().collect();
    for name in scales {
        let (dtype, shape, bytes) = &edit.tensors[&name];
        assert_eq!(*dtype, Dtype::BF16);
        let wide = floats(bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()));
        let shape = shape.clone();
        edit.tensors.put(&name.replace("_scale", "_offset"), Dtype::F32, &shape);
        edit.tensors.insert(name, (Dtype::F32, shape, wide));
    }
    let mut description = json!({});
    for name in edit.tensors.keys() {
        description[name] = json!(if name.contains("_proj.") { "W8A8_DYNAMIC" } else { "FLOAT" });
    }
    for (key, value) in [
        ("version", json!("1.0.0")),
        ("model_quant_type", json!("W8A8_DYNAMIC")),
        ("metadata", json!({})),
        ("group_size", json!(0)),
        ("optional", json!({})),
    ] {
        description[key] = value;
    }
    edit.config(|config| drop(config.as_object_mut().unwrap().shift_remove("quantization_config")));
    fs::remove_file(edit.path(super::SINGLE_FILE)).unwrap();
    write(&edit, &description);
    (edit, description)
}

fn write(edit: &Edit, description: &Value) {
    fs::write(edit.path(SHARD), edit.file(|_| true, 0)).unwrap();
    let map: serde_json::Map<_, _> = edit.tensors.keys().map(|name| (name.clone(), SHARD.into())).collect();
    fs::write(edit.path(INDEX_FILE), json!({ "weight_map": map }).to_string()).unwrap();
    fs::write(edit.path(DESCRIPTION_FILE), description.to_string()).unwrap();
}

#[test]
fn both_forms_of_the_same_numbers_are_the_same_model() {
    let hugging_face = Edit::new().open();
    let (edit, _) = ascend();
    let ascend = edit.open();
    assert_eq!((hugging_face.form(), ascend.form()), (Form::HuggingFace, Form::Ascend));
    assert_eq!(ascend.fingerprint(&|_, _| ()), hugging_face.fingerprint(&|_, _| ()));
    let (a, b) = (ascend.layer(1).unwrap(), hugging_face.layer(1).unwrap());
    assert_eq!((a.wk, a.wk_scale), (b.wk, b.wk_scale));
    assert_eq!(ascend.remarks(), hugging_face.remarks());
    // Without an index, in the single file that stands for it.
    fs::rename(edit.path(SHARD), edit.path(SINGLE_FILE)).unwrap();
    edit.is_refused("", &["holds both", INDEX_FILE, SINGLE_FILE]);
    fs::remove_file(edit.path(INDEX_FILE)).unwrap();
    assert_eq!(edit.open().layer(0).unwrap().wo, hugging_face.layer(0).unwrap().wo);
    fs::remove_file(edit.path(SINGLE_FILE)).unwrap();
    edit.is_refused("", &["neither", INDEX_FILE, SINGLE_FILE]);
}

#[test]
fn a_description_that_says_something_else_is_refused_by_key() {
    let cases: [(&str, Option<Value>, &[&str]); 16] = [
        ("model_quant_type", None, &["model_quant_type", "missing", "W8A8_DYNAMIC"]),
        ("model_quant_type", Some(json!("W8A8")), &["model_quant_type", "W8A8", "W8A8_DYNAMIC"]),
        ("version", Some(json!("2.0.0")), &["version", "2.0.0", "1.0.0"]),
        ("group_size", Some(json!(128)), &["group_size", "128"]),
        ("metadata", Some(json!({"quarot": {}})), &["metadata", "quarot"]),
        ("optional", Some(json!([1])), &["optional"]),
        ("kv_cache_type", Some(json!("C8")), &["kv_cache_type", "\"C8\"", "no such key"]),
        (Q, Some(json!("FLOAT")), &[Q, "\"FLOAT\"", "W8A8_DYNAMIC", "every projection"]),
        (Q, Some(json!("W8A8")), &[Q, "\"W8A8\"", "W8A8_DYNAMIC"]),
        (Q_SCALE, Some(json!("FLOAT")), &[Q_SCALE, "FLOAT"]),
        (OFFSET, Some(json!(1)), &[OFFSET, "is 1"]),
        (NORM, Some(json!("W8A8_DYNAMIC")), &[NORM, "W8A8_DYNAMIC", "\"FLOAT\"", "not quantized"]),
        (HEAD, Some(json!("W8A8_DYNAMIC")), &[HEAD, "not quantized"]),
        (Q, None, &[Q, "no word"]),
        ("model.rotary.weight", Some(json!("FLOAT")), &["model.rotary.weight", "in no shard", SHARD]),
        (
            "model.layers.0.self_attn.q_proj.quant_bias",
            Some(json!("W8A8_DYNAMIC")),
            &["q_proj.quant_bias", "in no shard"],
        ),
    ];
    let (edit, description) = ascend();
    for (key, value, parts) in cases {
        let mut changed = description.clone();
        match value {
            Some(value) => changed[key] = value,
            None => drop(changed.as_object_mut().unwrap().shift_remove(key)),
        }
        write(&edit, &changed);
        edit.is_refused(DESCRIPTION_FILE, parts);
    }
    fs::write(edit.path(DESCRIPTION_FILE), "{\"a.b\": \"FLOAT\", \"a.b\": \"FLOAT\"}").unwrap();
    edit.is_refused(DESCRIPTION_FILE, &["`a.b` twice"]);
    fs::write(edit.path(DESCRIPTION_FILE), "[").unwrap();
    edit.is_refused(DESCRIPTION_FILE, &["not the JSON"]);
}

#[test]
fn tensors_that_are_not_what_the_description_says_are_refused() {
    type Change = fn(&mut BTreeMap<String, Stored>);
    let cases: [(Change, &str, &[&str]); 9] = [
        (
            |t| t.get_mut(OFFSET).unwrap().2[4 * 5..][..4].copy_from_slice(&0.5f32.to_le_bytes()),
            SHARD,
            &[OFFSET, "element 5 is 0.5", "symmetric"],
        ),
        (|t| drop(t.remove(OFFSET)), "", &[OFFSET, "in no shard", SHARD]),
        (|t| t.put(OFFSET, Dtype::BF16, &[64, 1]), SHARD, &[OFFSET, "type BF16", "an offset is F32"]),
        (|t| t.put(OFFSET, Dtype::F32, &[64]), SHARD, &[OFFSET, "[64]", "[64, 1]"]),
        (|t| drop(t.remove(Q_SCALE)), SHARD, &[Q_SCALE, Q, "need their scale", SHARD]),
        (|t| t.put(Q_SCALE, Dtype::BF16, &[64, 1]), SHARD, &[Q_SCALE, "type BF16", "a scale is F32"]),
        (
            |t| t.get_mut(Q).unwrap().to_bf16(),
            SHARD,
            &[Q_SCALE, "type BF16", "quant_model_description.json declares it INT8"],
        ),
        (|t| t.put("model.norm.weight_offset", Dtype::F32, &[64]), SHARD, &["model.norm.weight_offset", "not part of"]),
        (|t| drop(t.remove(HEAD)), "", &[HEAD, "tie_word_embeddings"]),
    ];
    for (change, file, parts) in cases {
        let (mut edit, description) = ascend();
        change(&mut edit.tensors);
        write(&edit, &description);
        edit.is_refused(file, parts);
    }
}

#[test]
fn two_declarations_and_broken_files_are_refused() {
    let (edit, _) = ascend();
    edit.config(|config| config["quantize"] = json!("w8a8_dynamic"));
    edit.open();
    edit.config(|config| config["quantize"] = json!("w8a8"));
    edit.is_refused(CONFIG_FILE, &["quantize", "w8a8_dynamic"]);
    edit.config(|config| {
        config.as_object_mut().unwrap().shift_remove("quantize");
        config["quantization_config"] = config::quantization_config();
    });
    edit.is_refused(CONFIG_FILE, &["quantization_config", "is there", DESCRIPTION_FILE, "remove one"]);
    edit.config(|config| config["quantization_config"] = Value::Null);
    edit.open();

    let index = fs::read_to_string(edit.path(INDEX_FILE)).unwrap();
    let name = SHARD.trim_end_matches(".safetensors");
    fs::write(edit.path(INDEX_FILE), index.replacen(name, &format!("../{name}"), 1)).unwrap();
    edit.is_refused(INDEX_FILE, &["no name of a file beside"]);
    fs::write(edit.path(INDEX_FILE), index.replacen(NORM, "ghost", 1)).unwrap();
    edit.is_refused(SHARD, &["lacks tensor `ghost`"]);
    fs::write(edit.path(INDEX_FILE), &index).unwrap();
    let whole = fs::read(edit.path(SHARD)).unwrap();
    fs::write(edit.path(SHARD), &whole[..whole.len() - 1]).unwrap();
    edit.is_refused(SHARD, &["cut short"]);

    // What stands for a whole checkpoint of the other form is replaced with it.
    let again = Synthesis { geometry: small(), seed: 1, replace: true };
    synthesize(edit.dir.path(), &again, &mut |_, _| ()).unwrap();
    assert_eq!(edit.open().form(), Form::HuggingFace);
}
