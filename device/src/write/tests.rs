//! Round trips, and files with bytes changed.

use std::path::PathBuf;

use half::bf16;
use ndarray::{Array2, arr1};
use proptest::prelude::*;
use reference::{DType, Geometry, TensorId};

use super::*;
use crate::captures::{CapturedTensor, Layout, WrittenRows};

fn small() -> Geometry {
    Geometry {
        hidden_size: 8,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 4,
        intermediate_size: 6,
        num_hidden_layers: 1,
        vocab_size: 10,
        real_vocab_size: 9,
        rms_norm_eps: 1e-6,
    }
}

const DECODE: Layout = Layout::DecodeLayer { cache_rows: 256 };
const TOKENS: Layout = Layout::Tokens { rows: 2, decode_steps: 3, prompt_tokens: 5, cache_rows: 256 };

/// A stream of arbitrary bits, NaNs and infinities included.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 24
    }
    fn bf16(&mut self, shape: (usize, usize)) -> Array2<bf16> {
        Array2::from_shape_simple_fn(shape, || bf16::from_bits(self.next() as u16))
    }
    fn f32(&mut self, shape: (usize, usize)) -> Array2<f32> {
        Array2::from_shape_simple_fn(shape, || f32::from_bits(self.next() as u32))
    }
    fn tensor(&mut self, id: TensorId) -> Tensor {
        let [rows, columns] = id.shape(&small());
        match id.dtype() {
            DType::Bf16 => Tensor::Bf16(self.bf16((rows, columns))),
            DType::I8 => Tensor::I8(Array2::from_shape_simple_fn((rows, columns), || self.next() as i8)),
            _ => Tensor::F32(self.f32((rows, columns))),
        }
    }
    fn written(&mut self, rows: usize) -> WrittenRows {
        WrittenRows {
            rows: Captured::Values((0..rows).map(|_| self.next() as i64 - (1 << 39)).collect()),
            values: Captured::Values(self.bf16((rows, 4))),
        }
    }
}

fn decode(seed: u64, chosen: &[bool], written: usize, counts: Option<u64>) -> Captures {
    let mut bits = Bits(seed);
    let mut captures = Captures::default();
    for (id, _) in TensorId::ALL.into_iter().zip(chosen).filter(|(_, chosen)| **chosen) {
        if TensorId::from_capture_name(id.name()).is_some() {
            captures.tensors.insert(id, Captured::Values(bits.tensor(id)));
        }
    }
    captures.k_written = (written > 0).then(|| bits.written(written - 1));
    captures.v_written = (written > 1).then(|| bits.written(written));
    if let Some(count) = counts {
        captures.metadata.insert("attention_work_items".into(), count.to_string());
        captures.metadata.insert("made by".into(), "a \"test\"\n".into());
    }
    captures
}

fn whole() -> Captures {
    decode(7, &[true; 27], 5, Some(96))
}

fn tokens(seed: u64) -> Captures {
    let mut bits = Bits(seed);
    let mut captures = Captures { k_written: Some(bits.written(3)), ..Captures::default() };
    captures.tokens.token_ids = Some(Captured::Values(Array2::from_shape_simple_fn((2, 4), || bits.next() as i64)));
    captures.tokens.top2_logits = Some(Captured::Values(bits.f32((2, 8)).into_shape_with_order((2, 4, 2)).unwrap()));
    captures.tokens.prefill_hidden = Some(Captured::Values(bits.bf16((5, 8))));
    captures.tokens.decode_hidden =
        Some(Captured::Values(bits.bf16((3, 16)).into_shape_with_order((3, 2, 8)).unwrap()));
    captures
}

fn open(bytes: &[u8], layout: &Layout) -> Result<Captures, CaptureError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("captures.safetensors");
    std::fs::write(&path, bytes).unwrap();
    Captures::open(&path, &small(), layout)
}

/// Bits, for NaN is not equal to itself.
fn bits_of(captures: &Captures) -> Vec<u8> {
    serialize(captures).unwrap()
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        seed: u64, chosen in prop::collection::vec(any::<bool>(), 27), written in 0usize..6, counts: Option<u64>,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("captures.safetensors");
        let captures = decode(seed, &chosen, written, counts);
        write_captures(&path, &captures).unwrap();
        let read = Captures::open(&path, &small(), &DECODE).unwrap();
        prop_assert_eq!(bits_of(&read), bits_of(&captures));
        prop_assert_eq!(read.attention_work_items(), counts);
        prop_assert_eq!(&read.metadata, &captures.metadata);
        prop_assert_eq!(read.tensors.keys().collect::<Vec<_>>(), captures.tensors.keys().collect::<Vec<_>>());
        // The format's own reader agrees.
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (id, captured) in &captures.tensors {
            let Captured::Values(tensor) = captured else { unreachable!() };
            let view = file.tensor(id.name()).unwrap();
            prop_assert_eq!(view.shape(), tensor.shape());
            prop_assert_eq!(view.data().as_ptr() as usize % id.dtype().size(), bytes.as_ptr() as usize % id.dtype().size());
        }
    }

    #[test]
    fn token_runs_too(seed: u64) {
        let captures = tokens(seed);
        let read = open(&bits_of(&captures), &TOKENS).unwrap();
        prop_assert_eq!(bits_of(&read), bits_of(&captures));
        prop_assert!(read.tokens.top2_ids.is_none() && read.tensors.is_empty());
    }

    #[test]
    fn changed_bytes_never_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
                                 in_header: bool) {
        let mut bytes = bits_of(&whole());
        let end = if in_header { 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize } else { bytes.len() };
        for (index, value) in flips {
            bytes[index.index(end)] = value;
        }
        // Refused or read; a capture that is read is one that can be written again.
        if let Ok(captures) = open(&bytes, &DECODE) {
            let wrong = captures.tensors.values().any(|captured| captured.values().is_none());
            let written = [&captures.k_written, &captures.v_written];
            let wrong = wrong || written.into_iter().flatten().any(|written| {
                written.rows.values().is_none() || written.values.values().is_none()
            });
            prop_assert_eq!(serialize(&captures).is_err(), wrong);
        }
    }

    #[test]
    fn a_cut_or_lengthened_file_is_refused(at: prop::sample::Index, more in 1usize..9) {
        let whole = bits_of(&whole());
        prop_assert!(open(&whole[..at.index(whole.len())], &DECODE).is_err());
        let mut longer = whole;
        longer.resize(longer.len() + more, 0);
        let message = open(&longer, &DECODE).unwrap_err().to_string();
        prop_assert!(message.contains("appended"), "{}", message);
    }
}

/// A file of raw tensors, as another writer would make it.
fn foreign(tensors: &[(&str, Dtype, Vec<usize>)], metadata: &str) -> Vec<u8> {
    let (mut entries, mut end) = (vec![], 0);
    if !metadata.is_empty() {
        entries.push(format!(r#""__metadata__":{metadata}"#));
    }
    for (name, dtype, shape) in tensors {
        let begin = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        entries.push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#));
    }
    let header = format!("{{{}}}", entries.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..end).map(|index| (index % 120) as u8));
    bytes
}

#[test]
fn unaligned_data_is_read_all_the_same() {
    // An odd header and an odd tensor before: nothing is aligned, and the format does not ask for it.
    for padding in 0..8 {
        let metadata = format!(r#"{{"p":"{}"}}"#, "x".repeat(padding));
        let bytes =
            foreign(&[("normed_i8", Dtype::I8, vec![16, 8]), ("act_scales", Dtype::F32, vec![16, 1])], &metadata);
        let captures = open(&bytes, &DECODE).unwrap();
        let Some(Captured::Values(Tensor::F32(scales))) = captures.tensors.get(&TensorId::ActScales) else { panic!() };
        let expected = [128u8 % 120, 129 % 120, 130 % 120, 131 % 120];
        assert_eq!(scales[(0, 0)].to_bits().to_le_bytes(), expected);
    }
}

#[test]
fn a_vector_is_a_column() {
    for shape in [vec![16], vec![16, 1]] {
        let bytes = foreign(&[("inv_rms_states", Dtype::F32, shape)], "");
        let captures = open(&bytes, &DECODE).unwrap();
        assert_eq!(captures.tensors[&TensorId::InvRmsStates].values().unwrap().shape(), [16, 1]);
    }
}

#[test]
fn another_element_type_is_a_finding_and_not_an_error() {
    let bytes = foreign(
        &[
            ("out", Dtype::F32, vec![16, 8]),
            ("normed_i8", Dtype::U8, vec![16, 8]),
            ("k_written_rows", Dtype::I32, vec![3]),
            ("k_written_values", Dtype::F32, vec![3, 4]),
        ],
        "",
    );
    let captures = open(&bytes, &DECODE).unwrap();
    let wrong = |found: &str, shape: &[usize]| CapturedTensor::WrongDType { found: found.into(), shape: shape.into() };
    assert_eq!(captures.tensors[&TensorId::Out], wrong("FP32", &[16, 8]));
    assert_eq!(captures.tensors[&TensorId::NormedI8], wrong("U8", &[16, 8]));
    let written = captures.k_written.clone().unwrap();
    assert_eq!(written.rows, Captured::WrongDType { found: "INT32".into(), shape: vec![3] });
    assert_eq!(written.values, Captured::WrongDType { found: "FP32".into(), shape: vec![3, 4] });
    assert!(serialize(&captures).unwrap_err().to_string().contains("`normed_i8` has the wrong element type (U8)"));
}

#[test]
fn rows_out_of_range_are_kept() {
    let mut captures = whole();
    let mut rows = captures.k_written.clone().unwrap();
    rows.rows = Captured::Values(arr1(&[i64::MIN, -1, 255, i64::MAX]));
    captures.k_written = Some(rows);
    assert_eq!(open(&bits_of(&captures), &DECODE).unwrap().k_written.unwrap().rows.values().unwrap()[0], i64::MIN);
}

#[test]
fn malformed_captures_name_the_tensor_and_both_shapes() {
    let f32s = |name, shape: &[usize]| (name, Dtype::F32, shape.to_vec());
    let bf16s = |name, shape: &[usize]| (name, Dtype::BF16, shape.to_vec());
    let i64s = |name, shape: &[usize]| (name, Dtype::I64, shape.to_vec());
    let cases = [
        (vec![bf16s("out", &[16, 9])], "", "`out` has shape [16, 9]; expected [16, 8]"),
        (vec![bf16s("out", &[128])], "", "`out` has shape [128]; expected [16, 8]"),
        (vec![bf16s("out", &[16, 8, 1])], "", "`out` has shape [16, 8, 1]"),
        (vec![bf16s("out", &[16])], "", "`out` has shape [16]"),
        (vec![bf16s("out", &[])], "", "`out` has shape []"),
        (vec![f32s("out", &[8, 16])], "", "`out` has shape [8, 16]"),
        (vec![f32s("act_scales", &[1, 16])], "", "`act_scales` has shape [1, 16]; expected [16, 1]"),
        (vec![f32s("k_proj", &[16, 16])], "", "`k_proj` has shape [16, 16]; expected [16, 8]"),
        (vec![bf16s("outt", &[16, 8])], "", "unknown tensor `outt`; a decode_layer capture may hold act_scales,"),
        (vec![i64s("token_ids", &[2, 4])], "", "unknown tensor `token_ids`"),
        (vec![i64s("k_written_rows", &[2])], "", "has `k_written_rows` without `k_written_values`"),
        (vec![bf16s("v_written_values", &[2, 4])], "", "has `v_written_values` without `v_written_rows`"),
        (
            vec![i64s("k_written_rows", &[2]), bf16s("k_written_values", &[3, 4])],
            "",
            "`k_written_rows` lists 2 rows, but `k_written_values` holds 3",
        ),
        (vec![i64s("k_written_rows", &[257])], "", "`k_written_rows` has shape [257]; expected [0..=256]"),
        (vec![], r#"{"attention_work_items":"-1"}"#, "`attention_work_items` is \"-1\"; expected a decimal count"),
        (vec![], r#"{"online_softmax_work_items":""}"#, "`online_softmax_work_items` is \"\""),
    ];
    for (tensors, metadata, expected) in cases {
        let message = open(&foreign(&tensors, metadata), &DECODE).unwrap_err().to_string();
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
        assert!(message.contains("captures.safetensors: "), "{message:?} does not name the file");
    }
    let message = open(&foreign(&[bf16s("out", &[16, 8])], ""), &TOKENS).unwrap_err().to_string();
    assert!(message.contains("unknown tensor `out`; a tokens capture may hold decode_hidden,"), "{message}");
}

#[test]
fn what_is_no_file_is_refused_without_waiting() {
    let missing = Captures::open(&PathBuf::from("no/such/file"), &small(), &DECODE).unwrap_err();
    assert!(missing.to_string().starts_with("no/such/file: "), "{missing}");
    let dir = tempfile::tempdir().unwrap();
    let message = Captures::open(dir.path(), &small(), &DECODE).unwrap_err().to_string();
    assert!(message.ends_with("is not a regular file"), "{message}");
}

#[test]
fn strided_arrays_are_written_as_they_read() {
    let plain = whole();
    let mut turned = plain.clone();
    if let Some(Captured::Values(Tensor::Bf16(out))) = turned.tensors.get_mut(&TensorId::Out) {
        *out = out.t().as_standard_layout().into_owned().reversed_axes();
        assert!(!out.is_standard_layout());
    }
    assert_eq!(bits_of(&turned), bits_of(&plain));
}
