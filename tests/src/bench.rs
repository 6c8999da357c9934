//! A case, its inputs and a device's outputs, ready to be judged.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex};

use ::device::{Bundle, Captures};
use cases::{Case, Input, InputStore, Inputs, NewCase, Padding, PolicyRequest, Recipe, RecipeKind, new_case};
use goldens::report::CaseReport;
use goldens::{Job, Only, judge};
use reference::stages::run_layer;
use reference::{Freedom, Geometry, LayerInputs, Policy, TensorId};

use crate::Device;

/// The tensors that the gate may look at; `None` shows it all of them.
pub type Visible = Option<BTreeSet<TensorId>>;

/// A case with its inputs and the outputs of one right device.
#[derive(Debug)]
pub struct Bench {
    /// What was run.
    pub case: Case,
    /// Its inputs.
    pub inputs: Inputs,
    /// What the device gave.
    pub captures: Captures,
}

impl Bench {
    /// A bundle of the repository by its folder, e.g. `mini/active2`. Opened once for all tests of a program.
    #[must_use]
    pub fn recorded(name: &str) -> &'static Self {
        static OPEN: LazyLock<Mutex<BTreeMap<String, &'static Bench>>> = LazyLock::new(Mutex::default);
        // Never generate under the lock: a thread that waits for its part of the work may be given another test,
        // which would wait for the lock.
        let open = || OPEN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(bench) = open().get(name).copied() {
            return bench;
        }
        let bundle = Bundle::open(&Self::path(name)).unwrap();
        let inputs = Inputs::generate(&bundle.case, store()).unwrap();
        let captures = bundle.captures.expect("a recorded bundle holds captures");
        let bench = Box::leak(Box::new(Self { case: bundle.case, inputs, captures }));
        open().entry(name.to_owned()).or_insert(bench)
    }

    /// The folder of a bundle of the repository.
    #[must_use]
    pub fn path(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../goldens/bundles").join(name)
    }

    /// A case with the reference as its device, under `policy` and its freedom.
    #[must_use]
    pub fn run(case: Case, policy: &Policy) -> Self {
        let inputs = Inputs::generate(&case, store()).unwrap();
        let captures = {
            let layer = inputs.layer(0).unwrap();
            let trace = run_layer(&layer, policy);
            Device::new(layer, trace, policy.clone()).captures()
        };
        Self { case, inputs, captures }
    }

    /// A new case with the production kernels' rules and the emulated device's orders.
    #[must_use]
    pub fn emulated(case: Case) -> Self {
        Self::run(case, &Policy::production().under(Freedom::Emulated))
    }

    /// What the layer reads.
    #[must_use]
    pub fn layer(&self) -> LayerInputs<'_> {
        self.inputs.layer(0).unwrap()
    }

    /// The device's steps, to be changed; what follows from a change follows under the production kernels'
    /// rules and the emulated device's orders.
    #[must_use]
    pub fn device(&self) -> Device<'_> {
        Device::captured(self.layer(), &self.captures, Policy::production().under(Freedom::Emulated))
    }

    /// The gate's report on these outputs of this case.
    #[must_use]
    pub fn judge(&self, captures: Captures, policy: &PolicyRequest, only: &Visible) -> CaseReport {
        self.report(captures, policy, only, false)
    }

    /// The same, with a search for the cause.
    #[must_use]
    pub fn explain(&self, captures: Captures, policy: &PolicyRequest, only: &Visible) -> CaseReport {
        self.report(captures, policy, only, true)
    }

    fn report(&self, captures: Captures, policy: &PolicyRequest, only: &Visible, explain: bool) -> CaseReport {
        let bundle = Bundle { dir: PathBuf::new(), case: self.case.clone(), captures: Some(captures) };
        let only = only.clone().map(|layer| Only { layer, ..Only::default() });
        let only = only.as_ref();
        let job = Job { only, explain, ..Job::new(&bundle, &self.inputs, policy) };
        judge(&job, &()).unwrap()
    }

    /// The report under `auto` on everything the device gave.
    #[must_use]
    pub fn gate(&self, captures: Captures) -> CaseReport {
        self.judge(captures, &PolicyRequest::Auto, &None)
    }
}

/// Inputs of all benches of a program.
fn store() -> &'static InputStore {
    static STORE: LazyLock<InputStore> = LazyLock::new(InputStore::new);
    &STORE
}

/// Parameters of a small case: two active rows, three query heads a KV head, contexts that cross pages.
#[must_use]
pub fn small() -> NewCase {
    NewCase {
        name: "small".to_owned(),
        geometry: Geometry {
            hidden_size: 512,
            num_attention_heads: 6,
            num_key_value_heads: 2,
            head_dim: 64,
            intermediate_size: 128,
            num_hidden_layers: 1,
            vocab_size: 64,
            real_vocab_size: 60,
            rms_norm_eps: 1e-6,
        },
        geometry_name: None,
        layers: 1,
        seed: 7,
        active_batch: 2,
        seq_lens: vec![140, 77],
        max_seq: 512,
        pages: None,
        padding: Padding::Own,
        poison: None,
    }
}

/// The case that these parameters make, with some recipes replaced.
#[must_use]
pub fn with_recipe(parameters: NewCase, recipes: &[(Input, RecipeKind)]) -> Case {
    let mut case = new_case(parameters).unwrap();
    for &(input, kind) in recipes {
        case.tensors.insert(input, Recipe::new(kind));
    }
    // What is tested is a case that a file could hold.
    Case::parse(&case.to_yaml(), &case.path).unwrap()
}
