//! Faults that any tensor can have, in every tensor.

use assay_tests::{Device, said};
use goldens::report::Verdict;
use reference::stages::stage_of;
use reference::{BATCH, DType, TensorId};

use super::benches;

type Applies = fn(TensorId) -> bool;
type Plant = fn(&mut Device<'_>, TensorId);

/// A fault, whether a tensor can have it, and how it gets it.
const FAULTS: &[(&str, Applies, Plant)] = &[
    ("zeroed", any, |d, id| {
        d.map(id, |_, _, _| 0.0);
    }),
    ("negated", any, |d, id| {
        d.map(id, |_, _, x| -x);
    }),
    ("halved", any, |d, id| {
        d.map(id, |_, _, x| 0.5 * x);
    }),
    ("scaled by 1.01", any, |d, id| {
        d.map(id, |_, _, x| 1.01 * x);
    }),
    ("row 1 zeroed", any, |d, id| {
        let rows = rows_of_batch_row(d, id);
        d.map(id, |r, _, x| if r / rows % BATCH == 1 { 0.0 } else { x });
    }),
    ("rows 0 and 1 exchanged", any, |d, id| {
        let rows = rows_of_batch_row(d, id);
        d.rearrange(id, |r, c| match r / rows % BATCH {
            0 => (r + rows, c),
            1 => (r - rows, c),
            _ => (r, c),
        });
    }),
    ("one NaN", floating, |d, id| {
        let at = middle(d, id);
        d.map(id, |r, c, x| if (r, c) == at { f32::NAN } else { x });
    }),
    ("one infinity", floating, |d, id| {
        let at = middle(d, id);
        d.map(id, |r, c, x| if (r, c) == at { f32::INFINITY } else { x });
    }),
    ("one element doubled", any, |d, id| {
        let at = middle(d, id);
        d.map(id, |r, c, x| if (r, c) == at { if x.abs() > 60.0 { 0.5 * x } else { 2.0 * x } } else { x });
    }),
    ("one element off by one step", exact, |d, id| {
        let at = middle(d, id);
        d.nudge(id, |r, c| u32::from((r, c) == at));
    }),
    ("everything off by one step", exact, |d, id| {
        d.nudge(id, |_, _| 1);
    }),
    ("heads 0 and 1 exchanged", by_head, |d, id| {
        let dim = d.inputs.geometry.head_dim;
        d.rearrange(id, |r, c| match c / dim {
            0 => (r, c + dim),
            1 => (r, c - dim),
            _ => (r, c),
        });
    }),
    ("head 1 of row 1 zeroed", by_head, |d, id| {
        let dim = d.inputs.geometry.head_dim;
        d.map(id, |r, c, x| if r == 1 && c / dim == 1 { 0.0 } else { x });
    }),
    ("head 1 of every row zeroed", by_head, |d, id| {
        let dim = d.inputs.geometry.head_dim;
        d.map(id, |_, c, x| if c / dim == 1 { 0.0 } else { x });
    }),
];

/// Two neighbouring rows of a tensor that belong to neighbouring rows of the batch are this far apart.
fn rows_of_batch_row(device: &Device<'_>, id: TensorId) -> usize {
    if id == TensorId::AllQPadded { device.inputs.geometry.num_key_value_heads * BATCH } else { 1 }
}

/// An element of row 1 that is not zero.
fn middle(device: &Device<'_>, id: TensorId) -> (usize, usize) {
    let (row, tensor) = (rows_of_batch_row(device, id), device.tensor(id));
    let columns = tensor.shape()[1];
    let middle = (columns / 2..columns).chain(0..columns / 2).find(|&column| tensor.get(row, column) != 0.0);
    (row, middle.unwrap_or(0))
}

fn any(_: TensorId) -> bool {
    true
}

fn floating(id: TensorId) -> bool {
    id.dtype() != DType::I8
}

/// Tensors whose bits the contract fixes.
fn exact(id: TensorId) -> bool {
    !stage_of(id).free
}

fn by_head(id: TensorId) -> bool {
    use TensorId as T;
    let heads = [T::QProj, T::KProj, T::VProj, T::QProjNorm, T::KProjNorm, T::VProjNorm, T::KRows, T::VRows];
    heads.contains(&id) || matches!(id, T::AttnOut | T::AttnOutI8)
}

/// What is wrong with the report on one fault in one tensor.
fn complaint(name: &str, plant: Plant, id: TensorId, follow: bool) -> Option<String> {
    let bench = benches::two_rows();
    let mut device = bench.device();
    plant(&mut device, id);
    if follow {
        device.follow();
    }
    let report = bench.gate(device.captures());
    let expected = Some(id.name());
    let wrong = report.verdict != Verdict::Fail
        || report.first_divergence.as_deref() != expected
        || (follow && said::failing(&report) != [id.name()]);
    wrong.then(|| format!("{name} in {}, follow {follow}:\n{}", id.name(), said::summary(&report)))
}

#[test]
fn any_fault_in_any_tensor_is_found_there_and_only_there() {
    let mut planted = Vec::new();
    for &(name, applies, plant) in FAULTS {
        for id in TensorId::ALL.into_iter().filter(|&id| applies(id)) {
            planted.extend([(name, plant, id, true), (name, plant, id, false)]);
        }
    }
    let complaints: Vec<String> =
        planted.iter().filter_map(|&(name, plant, id, follow)| complaint(name, plant, id, follow)).collect();
    assert!(complaints.is_empty(), "{} of {}\n{}", complaints.len(), planted.len(), complaints.join("\n"));
}

#[test]
fn a_tensor_of_another_type_fails_and_is_not_converted() {
    let bench = benches::two_rows();
    for id in TensorId::ALL.into_iter().filter(|id| TensorId::from_capture_name(id.name()).is_some()) {
        let mut captures = bench.captures.clone();
        let shape = id.shape(&bench.case.geometry).to_vec();
        captures.tensors.insert(id, device::Captured::WrongDType { found: "FP16".to_owned(), shape });
        let report = bench.gate(captures);
        assert_eq!(report.verdict, Verdict::Fail, "{}", id.name());
        assert_eq!(report.first_divergence.as_deref(), Some(id.name()));
        let words = said::words(&report);
        assert!(words.contains("FP16") && words.contains(id.dtype().name()), "{}: {words}", id.name());
    }
}

#[test]
fn the_output_alone_shows_a_tensor_that_is_gone() {
    let bench = benches::two_rows();
    let alone = Some([TensorId::Out].into());
    let missed: Vec<&str> = TensorId::ALL
        .into_iter()
        .filter(|&id| {
            let mut device = bench.device();
            device.map(id, |_, _, _| 0.0).follow();
            let report = bench.judge(device.captures(), &cases::PolicyRequest::Auto, &alone);
            report.verdict != Verdict::Fail
        })
        .map(TensorId::name)
        .collect();
    assert_eq!(missed, Vec::<&str>::new());
}
