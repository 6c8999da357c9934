//! Inputs written and read again; outputs whole, sparse, halved and absent.

use cases::{InputStore, NewCase, TokensCase, new_case};
use half::bf16;
use ndarray::Array2;
use reference::Geometry;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::*;
use crate::captures::Captured;

fn small() -> Case {
    let geometry = Geometry {
        hidden_size: 8,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 4,
        intermediate_size: 6,
        num_hidden_layers: 1,
        vocab_size: 10,
        real_vocab_size: 9,
        rms_norm_eps: 1e-6,
    };
    let named = NewCase::named("a case", "mini").unwrap();
    new_case(NewCase { geometry, geometry_name: None, max_seq: 128, pages: Some(17), ..named }).unwrap()
}

/// A case, its inputs, and a directory.
fn bench() -> (Case, Inputs, tempfile::TempDir) {
    let case = small();
    let inputs = Inputs::generate(&case, &InputStore::new()).unwrap();
    (case, inputs, tempfile::tempdir().unwrap())
}

fn file(path: &Path, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        ((*name).to_owned(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn bytes(values: &Array2<bf16>) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn a_runner_gets_every_input_under_its_name() {
    let (case, inputs, dir) = bench();
    let path = dir.path().join(INPUTS_FILE);
    write_inputs(&path, &case, &inputs).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    assert_eq!((metadata["case"].as_str(), metadata["rms_norm_eps"].as_str()), ("a case", "1e-6"));
    let read = SafeTensors::deserialize(&bytes).unwrap();
    for input in case.inputs() {
        let view = read.tensor(input.name()).unwrap();
        assert_eq!(view.data(), inputs.bytes(input).unwrap(), "{}", input.name());
        assert_eq!(view.shape(), input.shape(&case.geometry, case.extent()), "{}", input.name());
        let address = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(address % input.dtype().size(), 0, "{} is aligned", input.name());
    }
    let int = |name: &str| {
        let view = read.tensor(name).unwrap();
        assert_eq!(view.dtype(), Dtype::I32, "{name}");
        view.data().as_chunks::<4>().0.iter().map(|&bytes| i32::from_le_bytes(bytes)).collect::<Vec<_>>()
    };
    let batch = case.batch().unwrap();
    assert_eq!(int("active_batch"), [1]);
    assert_eq!(int("seq_lens"), batch.seq_lens.map(|length| length as i32));
    assert_eq!(int("slot_mapping"), batch.slots.map(|slot| slot as i32));
    assert_eq!(int("block_table"), batch.block_table.concat());
    assert_eq!(read.len(), case.inputs().count() + 4);
    // A second one is not written over it.
    assert_eq!(write_inputs(&path, &case, &inputs).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
}

#[test]
fn a_token_run_has_its_prompts() {
    let mut case = small();
    case.kernel = Kernel::Tokens(TokensCase {
        prompts: vec![vec![3, 1], vec![2, 7, 5]],
        decode_steps: 4,
        block_table: vec![vec![1], vec![0]],
    });
    (case.active_batch, case.max_seq) = (2, 128);
    case.tensors = cases::standard_recipes();
    case.tensors.remove(&Input::HiddenStates);
    let inputs = Inputs::generate(&case, &InputStore::new()).unwrap();
    let tensors = input_tensors(&case, &inputs);
    let int = |name: &str| {
        let tensor = tensors.iter().find(|tensor| tensor.name == name).unwrap();
        tensor.bytes.as_chunks::<4>().0.iter().map(|&bytes| i32::from_le_bytes(bytes)).collect::<Vec<_>>()
    };
    assert_eq!(int("prompt_ids"), [3, 1, 2, 7, 5]);
    assert_eq!(int("prompt_lens"), [2, 3]);
    assert_eq!((int("decode_steps"), int("block_table")), (vec![4], vec![1, 0]));
    assert!(tensors.iter().any(|tensor| tensor.name == "embed_tokens"));
    assert!(tensors.iter().all(|tensor| tensor.name != "hidden_states" && tensor.name != "seq_lens"));
}

#[test]
fn written_rows_are_derived_from_whole_caches() {
    let (case, inputs, dir) = bench();
    let (before, path) = (inputs.bf16(Input::KCache).unwrap(), dir.path().join(CAPTURES_FILE));
    let mut after = before.to_owned();
    after[(5, 1)] = bf16::from_bits(after[(5, 1)].to_bits() ^ 1);
    // A NaN that stays the same NaN was not written; a zero that changed its sign was.
    after[(9, 0)] = bf16::from_bits(before[(9, 0)].to_bits() ^ 0x8000);
    let shape = before.shape().to_vec();
    file(&path, &[("k_cache", Dtype::BF16, shape.clone(), bytes(&after))]);
    let read = read_outputs(&path, &case, &inputs).unwrap().unwrap();
    let written = read.k_written.as_ref().unwrap();
    assert_eq!(written.rows.values().unwrap().to_vec(), [5, 9]);
    assert_eq!(written.values.values().unwrap().row(1), after.row(9));
    assert_eq!(read.v_written, None);

    // Only a runner may give whole caches.
    let layout = Layout::of(&case);
    let error = Captures::open(&path, &case.geometry, &layout).unwrap_err().to_string();
    assert!(error.contains("unknown tensor `k_cache`"), "{error}");

    let rows = ("k_written_rows", Dtype::I64, vec![0], Vec::new());
    let values = ("k_written_values", Dtype::BF16, vec![0, 4], Vec::new());
    file(&path, &[("k_cache", Dtype::BF16, shape, bytes(&after)), rows, values]);
    let error = read_outputs(&path, &case, &inputs).unwrap_err().to_string();
    assert!(error.contains("`k_cache` and `k_written_rows`"), "{error}");

    file(&path, &[("v_cache", Dtype::F16, before.shape().to_vec(), bytes(&after))]);
    let read = read_outputs(&path, &case, &inputs).unwrap().unwrap();
    let found = Captured::WrongDType { found: "F16".into(), shape: before.shape().to_vec() };
    assert_eq!(read.v_written.unwrap().values, found);

    file(&path, &[("v_cache", Dtype::BF16, vec![4, before.nrows()], bytes(&after))]);
    let error = read_outputs(&path, &case, &inputs).unwrap_err().to_string();
    assert!(error.contains("tensor `v_cache` has shape"), "{error}");
}

#[test]
fn half_a_file_is_refused_and_none_is_none() {
    let (case, inputs, dir) = bench();
    let path = dir.path().join(CAPTURES_FILE);
    assert!(read_outputs(&path, &case, &inputs).unwrap().is_none());
    file(&path, &[]);
    assert!(read_outputs(&path, &case, &inputs).unwrap().is_none());
    file(&path, &[("out", Dtype::BF16, vec![16, 8], vec![0; 256])]);
    assert!(read_outputs(&path, &case, &inputs).unwrap().is_some());
    assert!(read_outputs(dir.path(), &case, &inputs).unwrap().is_some(), "a directory that holds it");
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 7, 30, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        let error = read_outputs(&path, &case, &inputs).unwrap_err();
        assert!(error.fault().unwrap().to_string().contains("cut short"), "{error}");
    }
}
