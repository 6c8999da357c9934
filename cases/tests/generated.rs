//! Generated tensors have the documented bits, and the recorded cases' inputs have their recorded hashes.

// Helpers outside test functions fail a test by panicking too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use cases::seeded::{self, Rope, Stream};
use cases::{Case, Input, InputError, InputStore, Inputs, Kernel, OutlierColumns, Recipe, RecipeKind};
use proptest::prelude::*;
use reference::{DType, PAGE, Tensor};
use serde_json::Value;

const SAMPLES: [(&str, &str); 7] = [
    ("active1", include_str!("data/mini-active1.yaml")),
    ("active1-poison", include_str!("data/mini-active1-poison.yaml")),
    ("active2", include_str!("data/mini-active2.yaml")),
    ("active2-dirty", include_str!("data/mini-active2-dirty.yaml")),
    ("full", include_str!("data/mini-full.yaml")),
    ("tokens1", include_str!("data/mini-tokens1.yaml")),
    ("tokens2", include_str!("data/mini-tokens2.yaml")),
];

fn sample(name: &str) -> Case {
    let (_, text) = SAMPLES.into_iter().find(|(sample, _)| *sample == name).unwrap();
    Case::parse(text, Path::new(name)).unwrap()
}

fn golden() -> Value {
    serde_json::from_str(include_str!("data/seeded-golden.json")).unwrap()
}

/// The recipe of a check value, which calls `recipe` `kind`.
fn recipe(value: &Value) -> Recipe {
    let number = |key: &str| value[key].as_f64().unwrap();
    let kind = match value["kind"].as_str().unwrap() {
        "normal" => RecipeKind::Normal { mean: number("mean"), std: number("std"), bf16: value["bf16"] == true },
        "int8_normal" => RecipeKind::Int8Normal { std: number("std") as u32 },
        "uniform" => RecipeKind::Uniform { lo: number("lo"), hi: number("hi") },
        "constant" => RecipeKind::Constant { value: number("value") },
        other => panic!("{other}"),
    };
    let outlier_columns = value.get("outlier_columns").map(|columns| OutlierColumns {
        period: columns["period"].as_u64().unwrap() as usize,
        phase: columns["phase"].as_u64().unwrap() as usize,
        factor: columns["factor"].as_f64().unwrap(),
    });
    Recipe { kind, outlier_columns }
}

fn hex(value: &Value) -> u64 {
    u64::from_str_radix(value.as_str().unwrap().trim_start_matches("0x"), 16).unwrap()
}

#[test]
fn check_values() {
    let golden = golden();
    for entry in golden["tensors"].as_array().unwrap() {
        let name = entry["name"].as_str().unwrap();
        let seed = entry["seed"].as_u64().unwrap();
        let shape = [0, 1].map(|axis| entry["shape"][axis].as_u64().unwrap() as usize);
        let dtype = match entry["dtype"].as_str().unwrap() {
            "BF16" => DType::Bf16,
            "FP32" => DType::F32,
            "INT8" => DType::I8,
            other => panic!("{other}"),
        };
        assert_eq!(seeded::fnv1a(name), hex(&entry["fnv1a64"]), "{name}");
        let stream = Stream::new(seed, name);
        for (index, z) in entry["z"].as_array().unwrap().iter().enumerate() {
            assert_eq!(stream.z(index as u64), hex(z), "{name}[{index}]");
        }
        for (index, s) in entry["s"].as_array().unwrap().iter().enumerate() {
            assert_eq!(i64::from(seeded::centred(stream.z(index as u64))), s.as_i64().unwrap(), "{name}[{index}]");
        }
        let tensor = seeded::tensor(seed, name, dtype, shape, &recipe(&entry["recipe"])).unwrap();
        let at = |index: usize| (index / shape[1], index % shape[1]);
        for (index, value) in entry["values"].as_array().unwrap().iter().enumerate() {
            let (row, column) = at(index);
            assert_eq!(tensor.get(row, column), value.as_f64().unwrap() as f32, "{name}[{index}]");
        }
        for (index, bits) in entry["bits"].as_array().into_iter().flatten().enumerate() {
            let (row, column) = at(index);
            assert_eq!(u64::from(tensor.bits(row, column)), hex(bits), "{name}[{index}]");
        }
        if let Some(outlier) = entry.get("first_outlier") {
            let (row, column) = at(outlier["index"].as_u64().unwrap() as usize);
            assert_eq!(u64::from(tensor.bits(row, column)), hex(&outlier["bits"]), "{name}");
        }
    }
}

#[test]
fn rope_check_values() {
    let golden = golden();
    let theta = golden["rope"]["theta"].as_f64().unwrap();
    let head_dim = golden["rope"]["head_dim"].as_u64().unwrap() as usize;
    for (table, key) in [(Rope::Cos, "cos_pos3_first8_bits"), (Rope::Sin, "sin_pos3_first8_bits")] {
        let values = seeded::rope(table, 4, head_dim, theta).unwrap();
        for (column, bits) in golden["rope"][key].as_array().unwrap().iter().enumerate() {
            assert_eq!(u64::from(values[(3, column)].to_bits()), hex(bits), "{key}[{column}]");
            assert_eq!(values[(3, column)].to_bits(), values[(3, column + head_dim / 2)].to_bits());
        }
    }
}

#[test]
fn every_recorded_hash_is_reproduced() {
    let store = InputStore::new();
    for (name, _) in SAMPLES {
        let case = sample(name);
        let inputs = Inputs::generate(&case, &store).unwrap();
        // All of them are recorded, so `generate` has checked all of them.
        assert_eq!(inputs.hashes(), case.inputs_sha256, "{name}");
        assert_eq!(case.inputs_sha256.len(), case.inputs().count(), "{name}");
    }
}

#[test]
fn recorded_prompts_and_pages_are_the_generators() {
    for name in ["tokens1", "tokens2"] {
        let case = sample(name);
        let Kernel::Tokens(tokens) = &case.kernel else { panic!("{name}") };
        for (row, prompt) in tokens.prompts.iter().enumerate() {
            assert_eq!(*prompt, seeded::prompt(case.seed, row, prompt.len(), case.geometry.real_vocab_size));
        }
        let pages: Vec<usize> = tokens.block_table.iter().flatten().map(|&page| page as usize).collect();
        assert_eq!(pages, seeded::page_permutation(case.seed, 16 * case.max_blocks())[..pages.len()]);
    }
}

#[test]
fn a_wrong_hash_names_the_tensors() {
    let store = InputStore::new();
    let mut case = sample("active2");
    case.inputs_sha256.insert(Input::Wk, "0".repeat(64));
    case.inputs_sha256.insert(Input::WDown, "1".repeat(64));
    let error = Inputs::generate(&case, &store).unwrap_err();
    let InputError::Hash { tensor, expected, found, also, .. } = &error else { panic!("{error}") };
    assert_eq!((*tensor, expected.as_str(), also.as_slice()), ("wk", "0".repeat(64).as_str(), ["w_down"].as_slice()));
    assert_eq!(found, "003ec93b4bc05414c22bb512012d288fa37e7a0d5d64405a975448264e28ecda");
    assert!(error.to_string().contains("active2: inputs_sha256: wk: "), "{error}");
}

#[test]
fn a_clean_tensor_is_never_taken_for_a_changed_one() {
    let store = InputStore::new();
    // Same seed and recipes: replicated, own, and poisoned variants of the same tensors, twice over.
    for name in ["active1", "active1-poison", "active2-dirty", "active2", "active1-poison", "active1"] {
        Inputs::generate(&sample(name), &store).unwrap();
    }
    // A mean of -0.0 differs from 0.0 in bits only.
    let mut case = sample("active1");
    case.inputs_sha256.clear();
    case.tensors.insert(Input::KCache, Recipe::new(RecipeKind::Constant { value: 0.0 }));
    let positive = Inputs::generate(&case, &store).unwrap();
    case.tensors.insert(Input::KCache, Recipe::new(RecipeKind::Constant { value: -0.0 }));
    let negative = Inputs::generate(&case, &store).unwrap();
    assert_ne!(positive.sha256(Input::KCache), negative.sha256(Input::KCache));
    assert_eq!(positive.sha256(Input::VCache), negative.sha256(Input::VCache));
}

#[test]
fn stores_share_and_let_go() {
    let (small, large) = (InputStore::with_capacity(0), InputStore::new());
    let first = Inputs::generate(&sample("active1"), &large).unwrap();
    let alone = large.bytes();
    let second = Inputs::generate(&sample("active2"), &large).unwrap();
    let weights = |inputs: &Inputs| inputs.bytes(Input::WGate).unwrap().as_ptr();
    assert_eq!(weights(&first), weights(&second));
    // The hidden states differ in their padding rows; all else is shared.
    assert_eq!(large.bytes(), alone + first.bytes(Input::HiddenStates).unwrap().len());
    Inputs::generate(&sample("active1"), &small).unwrap();
    Inputs::generate(&sample("active2"), &small).unwrap();
    assert_eq!(small.bytes(), alone);
}

#[test]
fn poison_fills_what_lies_past_the_context() {
    let case = sample("active1-poison");
    let store = InputStore::new();
    let poisoned = Inputs::generate(&case, &store).unwrap();
    let clean = Inputs::generate(&sample("active1"), &store).unwrap();
    let (poisoned, clean) = (poisoned.bf16(Input::VCache).unwrap(), clean.bf16(Input::VCache).unwrap());
    let heads = case.geometry.num_key_value_heads;
    // 200 tokens: position 199 is offset 71 of page 39.
    let expected = |row: usize| row / PAGE / heads == 39 && row % PAGE > 71;
    for row in 0..poisoned.nrows() {
        let all_nan = poisoned.row(row).iter().all(|value| value.to_bits() == 0x7FC0);
        assert_eq!(all_nan, expected(row), "{row}");
        assert!(all_nan || poisoned.row(row) == clean.row(row), "{row}");
    }
}

#[test]
fn layers_are_slices_of_the_stack() {
    let store = InputStore::new();
    let inputs = Inputs::generate(&sample("tokens1"), &store).unwrap();
    let geometry = inputs.geometry().clone();
    let weights = inputs.weights(2).unwrap();
    assert_eq!(weights.wo.dim(), (geometry.q_width(), geometry.hidden_size));
    assert_eq!(weights.wo.row(5), inputs.i8(Input::Wo).unwrap().row(2 * geometry.q_width() + 5));
    assert_eq!(
        weights.w_down.terms(7..8).columns(0..geometry.hidden_size).row(0),
        inputs.bf16(Input::WDown).unwrap().row(2 * geometry.intermediate_size + 7)
    );
    assert_eq!(weights.wk_scale, inputs.f32(Input::WkScale).unwrap().row(2));
    let rows = 68 * geometry.num_key_value_heads * PAGE;
    assert_eq!(inputs.cache(3).unwrap().k.row(9), inputs.bf16(Input::KCache).unwrap().row(3 * rows + 9));
    assert!(matches!(inputs.weights(4), Err(InputError::Layer { layer: 4, layers: 4 })));
    assert!(matches!(inputs.layer(0), Err(InputError::NoBatch)));
    assert!(matches!(inputs.bf16(Input::HiddenStates), Err(InputError::NoTensor { .. })));
    assert!(matches!(inputs.i8(Input::WDown), Err(InputError::NoTensor { .. })));

    let case = sample("active2");
    let inputs = Inputs::generate(&case, &store).unwrap();
    let layer = inputs.layer(0).unwrap();
    assert_eq!(layer.batch, case.batch().unwrap());
    assert_eq!(layer.hidden_states.row(15), layer.hidden_states.row(0));
    assert_ne!(layer.hidden_states.row(1), layer.hidden_states.row(0));
    assert_eq!(layer.rope_cos.dim(), (512, 128));
    assert!(matches!(inputs.layer(1), Err(InputError::Layer { layer: 1, layers: 1 })));
}

/// The documented formula of one element, word for word.
fn documented(seed: u64, name: &str, index: u64, columns: usize, recipe: &Recipe) -> f32 {
    let mut z = (seed ^ seeded::fnv1a(name)).wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    let s = ((z & 0xFFFF) + ((z >> 16) & 0xFFFF) + ((z >> 32) & 0xFFFF) + (z >> 48)) as i64 - 131_070;
    let value = match recipe.kind {
        RecipeKind::Normal { mean, std, bf16 } => {
            let sigma = ((65_536.0_f64 * 65_536.0 - 1.0) / 3.0).sqrt();
            let product = s as f32 * (std / sigma) as f32;
            let value = product + mean as f32;
            if bf16 { half::bf16::from_f32(value).to_f32() } else { value }
        }
        RecipeKind::Int8Normal { std } => {
            (2 * s * i64::from(std) + 37_837).div_euclid(2 * 37_837).clamp(-127, 127) as f32
        }
        RecipeKind::Uniform { lo, hi } => {
            let u = (z >> 40) as f32 * 2.0_f32.powi(-24);
            lo as f32 + u * (hi - lo) as f32
        }
        RecipeKind::Zeros => 0.0,
        RecipeKind::Ones => 1.0,
        RecipeKind::Constant { value } => value as f32,
    };
    match recipe.outlier_columns {
        Some(OutlierColumns { period, phase, factor }) if index as usize % columns % period == phase => {
            value * factor as f32
        }
        _ => value,
    }
}

fn any_recipe() -> impl Strategy<Value = Recipe> {
    let real = -1e3..1e3_f64;
    let kind = prop_oneof![
        (real.clone(), 0.0..1e3_f64, any::<bool>()).prop_map(|(mean, std, bf16)| RecipeKind::Normal {
            mean,
            std,
            bf16
        }),
        (0..=4096_u32).prop_map(|std| RecipeKind::Int8Normal { std }),
        (real.clone(), 0.0..1e3_f64).prop_map(|(lo, width)| RecipeKind::Uniform { lo, hi: lo + width }),
        Just(RecipeKind::Zeros),
        Just(RecipeKind::Ones),
        real.prop_map(|value| RecipeKind::Constant { value }),
        (-128..=127_i32).prop_map(|value| RecipeKind::Constant { value: f64::from(value) }),
    ];
    let columns = prop::option::of((1..50_usize, 0..50_usize, -4..8_i32).prop_map(|(period, phase, power)| {
        OutlierColumns { period, phase: phase % period, factor: f64::from(power).exp2() }
    }));
    (kind, columns).prop_map(|(kind, outlier_columns)| Recipe { kind, outlier_columns })
}

proptest! {
    #[test]
    fn tensors_follow_the_documented_formula(
        seed in any::<u64>(),
        rows in 0..5_usize,
        columns in 1..40_000_usize,
        recipe in any_recipe(),
        dtype in prop::sample::select(vec![DType::F32, DType::Bf16, DType::I8]),
    ) {
        let Ok(tensor) = seeded::tensor(seed, "t", dtype, [rows, columns], &recipe) else {
            prop_assert!(recipe.check(dtype).is_err());
            return Ok(());
        };
        prop_assert_eq!(tensor.shape(), [rows, columns]);
        for row in 0..rows {
            for column in 0..columns {
                let wide = documented(seed, "t", (row * columns + column) as u64, columns, &recipe);
                let expected = match &tensor {
                    Tensor::Bf16(_) => u32::from(half::bf16::from_f32(wide).to_bits()),
                    Tensor::F32(_) => wide.to_bits(),
                    Tensor::I8(_) => u32::from(wide as i8 as u8),
                };
                prop_assert_eq!(tensor.bits(row, column), expected, "[{}, {}] of {}", row, column, recipe);
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_the_thread_count(seed in any::<u64>(), threads in 1..5_usize) {
        let recipe = Recipe::new(RecipeKind::Normal { mean: 0.5, std: 1.0, bf16: false });
        let draw = || seeded::tensor(seed, "t", DType::Bf16, [3, 50_000], &recipe).unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        prop_assert_eq!(pool.install(draw), draw());
    }

    #[test]
    fn page_permutations_hold_every_page_once(seed in any::<u64>(), count in 0..300_usize) {
        let mut pages = seeded::page_permutation(seed, count);
        pages.sort_unstable();
        prop_assert_eq!(pages, (0..count).collect::<Vec<_>>());
    }
}
