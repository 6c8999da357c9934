//! Same bits everywhere: no verdict and no tensor depends on the number of threads, on the instruction set, on how
//! weights lie, or on whether equal rows are computed once.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Command, Stdio};
use std::sync::LazyLock;

use assay_tests::{Bench, assay};
use cases::seeded;
use cases::{Input, InputStore, Inputs, NewCase, Padding, Recipe, RecipeKind, new_case};
use half::bf16;
use ndarray::{Array2, ArrayView2, s};
use rayon::ThreadPoolBuilder;
use reference::kernels::levels;
use reference::rounding::to_bf16;
use reference::stages::{Context, STAGES, Trace, run_all, run_layer, run_stage};
use reference::{
    BATCH, Batch, DType, DownWeight, Freedom, Geometry, LayerInputs, LayerWeights, Policy, Rounding, Site, Tensor,
    TensorId,
};
use serde_json::Value;

/// The gate's whole report on a recorded bundle, in a process of its own, without its times.
fn report(bundle: &str, threads: usize, level: Option<&str>) -> Value {
    let mut command = Command::new(assay());
    command.args(["gate", "--format", "json", "--verbose"]).arg(Bench::path(bundle));
    command.env("RAYON_NUM_THREADS", threads.to_string()).env_remove("ASSAY_KERNELS");
    command.args(level.into_iter().flat_map(|level| ["--kernels", level]));
    let run = command.stdin(Stdio::null()).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let mut report = serde_json::from_slice(&run.stdout).unwrap();
    assert!(forget_times(&mut report) > 0, "the report of a run that was timed");
    report
}

/// Removes every `seconds`; returns how many there were.
fn forget_times(value: &mut Value) -> usize {
    match value {
        Value::Object(fields) => {
            let own = usize::from(fields.remove("seconds").is_some());
            own + fields.values_mut().map(forget_times).sum::<usize>()
        }
        Value::Array(values) => values.iter_mut().map(forget_times).sum(),
        _ => 0,
    }
}

/// Every number of threads, then every level.
fn same_report_everywhere(bundle: &str) {
    let expected = report(bundle, 1, None);
    assert_eq!(expected["verdict"], "pass");
    for threads in [2, 3] {
        assert_eq!(report(bundle, threads, None), expected, "{bundle}: {threads} threads");
    }
    for level in levels() {
        assert_eq!(report(bundle, 2, Some(level.name())), expected, "{bundle}: kernels {}", level.name());
    }
}

#[test]
fn a_small_bundle_has_one_report() {
    same_report_everywhere("mini/active2-dirty");
}

#[test]
fn a_bundle_of_full_size_has_one_report() {
    same_report_everywhere("14b/active2");
}

/// A layer with two different rows and padding, its weights in every way in which they can lie.
struct Held {
    inputs: Inputs,
    /// `[out, in]` copies of the INT8 projections, in the order of [`Held::projections`].
    turned: [Array2<i8>; 6],
    /// The down weight as codes `[I, H]`, turned, and as the BF16 weight that a loader makes of codes and scale.
    codes: Array2<i8>,
    turned_codes: Array2<i8>,
    down: Array2<bf16>,
    turned_down: Array2<bf16>,
}

impl Held {
    fn new() -> Self {
        let geometry = Geometry::named("mini").unwrap();
        let case = new_case(NewCase { active_batch: 2, seq_lens: vec![200, 131], ..named() }).unwrap();
        let inputs = Inputs::generate(&case, &InputStore::with_capacity(0)).unwrap();
        let shape = [geometry.intermediate_size, geometry.hidden_size];
        let recipe = Recipe::new(RecipeKind::Int8Normal { std: 32 });
        let drawn = seeded::tensor(7, Input::WDown.name(), DType::I8, shape, &recipe).unwrap();
        let Tensor::I8(mut codes) = drawn else { panic!("codes were asked for") };
        // Weights may hold what activations never do.
        codes[(3, 5)] = -128;
        let scale = inputs.layer(0).unwrap().weights.wo_scale.to_owned();
        let value = |(k, n)| to_bf16(f32::from(codes[(k, n)]) * scale[n], Rounding::Rne);
        let down = Array2::from_shape_fn(codes.dim(), value);
        Self {
            turned: Self::projections(&inputs.layer(0).unwrap().weights).map(turn),
            turned_codes: turn(codes.view()),
            turned_down: turn(down.view()),
            inputs,
            codes,
            down,
        }
    }

    fn projections<'a>(w: &LayerWeights<'a>) -> [ArrayView2<'a, i8>; 6] {
        [w.wq, w.wk, w.wv, w.wo, w.w_gate, w.w_up]
    }

    /// The layer with its projections `[in, out]` or `[out, in]` and one of the forms of its down weight.
    fn layer<'a>(&'a self, out_in: bool, w_down: DownWeight<'a>) -> LayerInputs<'a> {
        let layer = self.inputs.layer(0).unwrap();
        let of_turned = [0, 1, 2, 3, 4, 5].map(|index: usize| self.turned[index].t());
        let [wq, wk, wv, wo, w_gate, w_up] = if out_in { of_turned } else { Self::projections(&layer.weights) };
        LayerInputs { weights: LayerWeights { wq, wk, wv, wo, w_gate, w_up, w_down, ..layer.weights }, ..layer }
    }

    fn downs(&self) -> [(&'static str, DownWeight<'_>); 4] {
        let scale = self.inputs.layer(0).unwrap().weights.wo_scale;
        [
            ("BF16 [in, out]", DownWeight::Bf16(self.down.view())),
            ("BF16 [out, in]", DownWeight::Bf16(self.turned_down.t())),
            ("INT8 [in, out]", DownWeight::Int8 { codes: self.codes.view(), scale }),
            ("INT8 [out, in]", DownWeight::Int8 { codes: self.turned_codes.t(), scale }),
        ]
    }
}

fn named() -> NewCase {
    NewCase::named("determinism", "mini").unwrap()
}

/// A copy whose transposed view is `weight` again.
fn turn<T: Copy>(weight: ArrayView2<'_, T>) -> Array2<T> {
    Array2::from_shape_fn((weight.ncols(), weight.nrows()), |(out, input)| weight[(input, out)])
}

fn held() -> &'static Held {
    static HELD: LazyLock<Held> = LazyLock::new(Held::new);
    &HELD
}

/// Rounding rules and the orders of FP32 sums, those of the reference and those of the emulated device.
fn policies() -> [Policy; 2] {
    [Policy::rne(), Policy::production().under(Freedom::Emulated)]
}

/// Bits of a tensor, widened, with its columns.
fn bits(tensor: &Tensor) -> Array2<u32> {
    match tensor {
        Tensor::F32(values) => values.mapv(f32::to_bits),
        Tensor::Bf16(values) => values.mapv(|value| value.to_bits().into()),
        Tensor::I8(values) => values.mapv(|value| u32::from(value.cast_unsigned())),
    }
}

fn assert_same(found: &Trace, expected: &Trace, what: &str) {
    for &id in TensorId::ALL.iter() {
        let name = id.name();
        assert!(bits(found.get(id).unwrap()) == bits(expected.get(id).unwrap()), "{what}: {name} differs");
        let wide = |trace: &Trace| trace.wide(id).map(|wide| wide.mapv(f32::to_bits));
        assert!(wide(found) == wide(expected), "{what}: values behind {name} differ");
    }
}

#[test]
fn no_tensor_depends_on_how_weights_lie() {
    let held = held();
    for policy in policies() {
        let [(_, as_kernels_hold_it), ..] = held.downs();
        let expected = run_all(Context::new(&held.layer(false, as_kernels_hold_it), &policy));
        for out_in in [false, true] {
            for (down, weight) in held.downs() {
                let found = run_all(Context::new(&held.layer(out_in, weight), &policy));
                assert_same(&found, &expected, &format!("[out, in]: {out_in}, down weight {down}"));
            }
        }
    }
}

#[test]
fn no_tensor_depends_on_the_number_of_threads() {
    let held = held();
    let [(_, kernels), .., (_, checkpoint)] = held.downs();
    for policy in policies() {
        for layer in [held.layer(false, kernels), held.layer(true, checkpoint)] {
            let on = |threads: usize| {
                let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| run_all(Context::new(&layer, &policy)))
            };
            let expected = on(1);
            for threads in [2, 3, 5] {
                assert_same(&on(threads), &expected, &format!("{threads} threads"));
            }
        }
    }
}

#[test]
fn a_run_that_leaves_replicas_out_is_the_run_of_all_rows() {
    for padding in [Padding::ReplicateRow0, Padding::Own] {
        let case = new_case(NewCase { active_batch: 2, seq_lens: vec![33, 140], padding, ..named() }).unwrap();
        let inputs = Inputs::generate(&case, &InputStore::with_capacity(0)).unwrap();
        let mut layer = inputs.layer(0).unwrap();
        // Of the padding rows one is not row 0, by the sign of a zero that its own values had.
        let mut hidden = layer.hidden_states.to_owned();
        hidden.slice_mut(s![.., 7]).fill(bf16::ZERO);
        hidden[(5, 7)] = bf16::NEG_ZERO;
        layer.hidden_states = hidden.view();
        for policy in policies().into_iter().chain([Policy::rne().with(Site::Silu, Rounding::None)]) {
            let mut expected = Trace::new();
            for stage in STAGES {
                assert!(run_stage(stage, &Context::new(&layer, &policy), &mut expected));
            }
            assert_same(&run_all(Context::new(&layer, &policy)), &expected, "with the values behind casts");
            let lean = run_layer(&layer, &policy);
            for id in TensorId::ALL {
                assert!(bits(lean.get(id).unwrap()) == bits(expected.get(id).unwrap()), "{} differs", id.name());
                let handed_on = id == TensorId::MlpDownTile && policy.at(Site::Silu) == Rounding::None;
                assert_eq!(lean.wide(id).is_some(), handed_on, "values behind {}", id.name());
            }
        }
    }
}

/// The rows of a tensor that belong to row `b` of the batch.
fn of_row(trace: &Trace, id: TensorId, b: usize) -> Array2<u32> {
    let all = bits(trace.get(id).unwrap());
    if id == TensorId::DownAccParts {
        // Two halves, each of all rows.
        return all.slice(s![b..;BATCH, ..]).to_owned();
    }
    let rows = all.nrows() / BATCH;
    all.slice(s![b * rows..(b + 1) * rows, ..]).to_owned()
}

#[test]
fn a_row_is_the_same_alone_among_equals_and_among_others() {
    let seq_lens: Vec<usize> = (0..BATCH).map(|row| 1 + row * 17).collect();
    let case = new_case(NewCase { active_batch: BATCH, seq_lens, padding: Padding::Own, ..named() }).unwrap();
    let inputs = Inputs::generate(&case, &InputStore::with_capacity(0)).unwrap();
    let layer = inputs.layer(0).unwrap();
    for policy in policies() {
        let all = run_layer(&layer, &policy);
        for b in [0, 1, 9, 15] {
            // Row b, and as padding itself again or every other row: fifteen equal ones, or fifteen different.
            let source = |row: usize, equals: bool| if row == 0 || equals { b } else { row };
            for equals in [true, false] {
                let batch = Batch {
                    active: 1,
                    seq_lens: std::array::from_fn(|row| layer.batch.seq_lens[source(row, equals)]),
                    block_table: (0..BATCH).map(|row| layer.batch.block_table[source(row, equals)].clone()).collect(),
                    slots: std::array::from_fn(|row| layer.batch.slots[source(row, equals)]),
                };
                let hidden = Array2::from_shape_fn(layer.hidden_states.dim(), |(row, column)| {
                    layer.hidden_states[(source(row, equals), column)]
                });
                let same = inputs.layer(0).unwrap();
                let alone = run_layer(&LayerInputs { batch: &batch, hidden_states: hidden.view(), ..same }, &policy);
                for &id in TensorId::ALL.iter() {
                    let expected = of_row(&all, id, b);
                    let rows = if equals { 0..BATCH } else { 0..1 };
                    for row in rows {
                        let name = id.name();
                        assert!(of_row(&alone, id, row) == expected, "row {b} as row {row}, {equals}: {name} differs");
                    }
                }
            }
        }
    }
}
