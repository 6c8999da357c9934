//! Files and values that nobody would write on purpose: each ends with a report or with an error that says where,
//! never with a panic.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::sync::LazyLock;

use assay_tests::{Bench, small};
use cases::{Case, InputStore, Inputs, PolicyRequest, new_case};
use device::{Bundle, CAPTURES_FILE, Captured};
use goldens::report::Verdict;
use goldens::{FALSE_ALARM, Job, judge};
use half::bf16;
use proptest::prelude::*;
use proptest::sample::{Index, select, subsequence};
use reference::{Tensor, TensorId};

static RIGHT: LazyLock<Bench> = LazyLock::new(|| Bench::emulated(new_case(small()).unwrap()));

/// The two files of a small bundle, and those of a recorded one.
static FILES: LazyLock<[[Vec<u8>; 2]; 2]> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    RIGHT.write(folder.path());
    [folder.path().to_owned(), Bench::path("mini/active2-dirty")]
        .map(|folder| ["case.yaml", CAPTURES_FILE].map(|file| fs::read(folder.join(file)).unwrap()))
});

/// Opens and judges a bundle of these two files. `Err` is an error that a person would be shown.
fn end(files: [&[u8]; 2], store: &InputStore) -> Result<Verdict, String> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("case.yaml"), files[0]).unwrap();
    fs::write(folder.path().join(CAPTURES_FILE), files[1]).unwrap();
    let bundle = Bundle::open(folder.path()).map_err(|error| error.to_string())?;
    let inputs = Inputs::generate(&bundle.case, store).map_err(|error| error.to_string())?;
    let job = Job {
        bundle: &bundle,
        inputs: &inputs,
        policy: &bundle.case.policy,
        only: None,
        false_alarm: FALSE_ALARM,
        maps: false,
    };
    judge(&job, &()).map(|report| report.verdict).map_err(|error| error.to_string())
}

/// Damage to a file.
#[derive(Clone, Debug)]
enum Damage {
    Flip(Index, u8),
    Cut(Index),
    Remove(Index, usize),
    Insert(Index, Vec<u8>),
    Repeat(Index, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        4 => (any::<Index>(), 1..=255u8).prop_map(|(at, mask)| Damage::Flip(at, mask)),
        1 => any::<Index>().prop_map(Damage::Cut),
        1 => (any::<Index>(), 1..64usize).prop_map(|(at, length)| Damage::Remove(at, length)),
        1 => (any::<Index>(), prop::collection::vec(any::<u8>(), 1..16)).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        1 => (any::<Index>(), 1..200usize).prop_map(|(at, length)| Damage::Repeat(at, length)),
    ]
}

/// Applies damage within the first `reach` bytes.
fn damaged(bytes: &[u8], damages: &[Damage], reach: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for damage in damages {
        let reach = reach.min(bytes.len());
        if reach == 0 {
            break;
        }
        match damage {
            Damage::Flip(at, mask) => bytes[at.index(reach)] ^= mask,
            Damage::Cut(at) => bytes.truncate(at.index(reach)),
            Damage::Remove(at, length) => {
                let at = at.index(reach);
                bytes.drain(at..(at + length).min(reach));
            }
            Damage::Insert(at, inserted) => {
                let at = at.index(reach);
                bytes.splice(at..at, inserted.iter().copied());
            }
            Damage::Repeat(at, length) => {
                let at = at.index(reach);
                let piece = bytes[at..(at + length).min(reach)].to_vec();
                bytes.splice(at..at, piece);
            }
        }
    }
    bytes
}

/// Text that could have stood in a case file.
fn scalar() -> impl Strategy<Value = String> {
    let odd = ["-1", "0", "17", "1e400", ".nan", ".inf", "-.inf", "~", "''", "[]", "{}", "18446744073709551616"];
    prop_oneof![
        select(odd.map(str::to_owned).to_vec()),
        any::<i64>().prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| number.to_string()),
        "[ -~]{0,12}",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_case_is_an_error_or_a_case(damages in prop::collection::vec(damage(), 1..4), which in 0..2usize) {
        let bytes = damaged(&FILES[which][0], &damages, usize::MAX);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("case.yaml");
        fs::write(&path, &bytes).unwrap();
        match Case::load(&path) {
            Ok(case) => {
                // What is accepted can be written and read again.
                let again = Case::parse(&case.to_yaml(), &case.path).map_err(|e| TestCaseError::fail(e.to_string()))?;
                prop_assert_eq!(&again.name, &case.name);
                let _ = case.warnings();
            }
            Err(error) => prop_assert!(error.to_string().contains("case.yaml"), "{}", error),
        }
    }

    #[test]
    fn any_scalar_in_any_line_is_an_error_or_a_case(line in any::<Index>(), value in scalar()) {
        let text = String::from_utf8(FILES[0][0].clone()).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let line = line.index(lines.len());
        let key = lines[line].split(": ").next().unwrap_or_default().to_owned();
        lines[line] = format!("{key}: {value}");
        if let Err(error) = Case::parse(&lines.join("\n"), std::path::Path::new("case.yaml")) {
            prop_assert!(error.to_string().starts_with("case.yaml"), "{}", error);
        }
    }

    #[test]
    fn damaged_captures_end_with_a_report_or_an_error(
        damages in prop::collection::vec(damage(), 1..4),
        header_only in any::<bool>(),
    ) {
        static STORE: LazyLock<InputStore> = LazyLock::new(InputStore::new);
        let [case, captures] = &FILES[0];
        let header = 8 + u64::from_le_bytes(captures[..8].try_into().unwrap()) as usize;
        let reach = if header_only { header } else { usize::MAX };
        if let Err(error) = end([case, &damaged(captures, &damages, reach)], &STORE) {
            prop_assert!(error.contains(CAPTURES_FILE), "{}", error);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_recorded_bundle_with_one_bit_changed_ends_with_a_report(at in any::<Index>(), bit in 0..8u32) {
        static STORE: LazyLock<InputStore> = LazyLock::new(InputStore::new);
        let [case, captures] = &FILES[1];
        let header = 8 + u64::from_le_bytes(captures[..8].try_into().unwrap()) as usize;
        let mut captures = captures.clone();
        let at = header + at.index(captures.len() - header);
        captures[at] ^= 1 << bit;
        // A low bit of a tensor with freedoms may be one of the values that they allow.
        let verdict = end([case, &captures], &STORE);
        prop_assert!(verdict.is_ok(), "{:?}", verdict);
    }
}

/// Values that arithmetic does not expect.
const ABSURD: [f32; 14] = [
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    1e-45,
    -1e-45,
    0.0,
    -0.0,
    1.0,
    -128.0,
    3e38,
    1e-20,
];

/// Fills part of a tensor.
fn filled(tensor: &Tensor, value: f32, every: usize) -> Tensor {
    let hit = |(row, column): (usize, usize)| (row + column).is_multiple_of(every);
    match tensor.clone() {
        Tensor::Bf16(mut values) => {
            values.indexed_iter_mut().filter(|(at, _)| hit(*at)).for_each(|(_, x)| *x = bf16::from_f32(value));
            Tensor::Bf16(values)
        }
        Tensor::F32(mut values) => {
            values.indexed_iter_mut().filter(|(at, _)| hit(*at)).for_each(|(_, x)| *x = value);
            Tensor::F32(values)
        }
        Tensor::I8(mut values) => {
            values.indexed_iter_mut().filter(|(at, _)| hit(*at)).for_each(|(_, x)| *x = value as i8);
            Tensor::I8(values)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn absurd_values_fail_and_never_panic(
        fills in prop::collection::vec((select(TensorId::ALL.to_vec()), select(ABSURD.to_vec()), 1..40usize), 1..5),
        shown in subsequence(TensorId::ALL.to_vec(), 1..TensorId::ALL.len()),
        partly in any::<bool>(),
        policy in select(vec![PolicyRequest::Auto, PolicyRequest::Production, PolicyRequest::Rne]),
    ) {
        let mut device = RIGHT.device();
        for &(id, value, every) in &fills {
            let tensor = filled(device.tensor(id), value, every);
            device.set(id, tensor);
        }
        let captures = device.captures();
        let changed = captures != RIGHT.captures;
        let only = partly.then(|| shown.into_iter().collect());
        let report = RIGHT.judge(captures, &policy, &only);
        if changed && !partly {
            prop_assert_eq!(report.verdict, Verdict::Fail, "{:?}", fills);
        }
        // Whatever was found can be shown.
        prop_assert!(serde_json::to_string(&report).is_ok());
    }
}

#[test]
fn every_tensor_full_of_one_absurd_value_fails() {
    for value in ABSURD {
        let mut captures = RIGHT.captures.clone();
        for captured in captures.tensors.values_mut() {
            if let Captured::Values(tensor) = captured {
                *tensor = filled(tensor, value, 1);
            }
        }
        assert_eq!(RIGHT.gate(captures).verdict, Verdict::Fail, "{value}");
    }
}
