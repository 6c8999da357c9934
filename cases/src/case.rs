//! A case: what was run, as `case.yaml` says it (`docs/bundles.md`). A value of this type has passed
//! every rule of that document; [`crate::check`] holds the rules.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use reference::{Batch, Geometry, PAGE};

use crate::check;
use crate::error::{CaseError, read_text};
use crate::input::{Extent, Input};
use crate::launch::Launch;
use crate::policy::PolicyRequest;
use crate::recipe::Recipe;

/// What was run.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The case file.
    pub path: PathBuf,
    /// The case's own name, e.g. `mini/active2`.
    pub name: String,
    /// The kernel, with what only it takes.
    pub kernel: Kernel,
    /// Sizes of the model.
    pub geometry: Geometry,
    /// The geometry's name, where the file gives it by name.
    pub geometry_name: Option<String>,
    /// Layers stacked in weights and caches, 1..=`num_hidden_layers`.
    pub layers: usize,
    /// Seed of every generated tensor.
    pub seed: u64,
    /// Rows of the RoPE tables: the longest context.
    pub max_seq: usize,
    /// KV pages of each layer.
    pub pages: usize,
    /// Base of the RoPE frequencies.
    pub rope_theta: f64,
    /// One recipe for each generated input of the kernel.
    pub tensors: BTreeMap<Input, Recipe>,
    /// Real rows, 1..=16.
    pub active_batch: usize,
    /// What rows from `active_batch` on hold.
    pub padding: Padding,
    /// Rounding rules that the device is held to.
    pub policy: PolicyRequest,
    /// Whether the file has a `policy:` key; without one the policy is `Auto`.
    pub policy_in_case: bool,
    /// What fills cache slots past each context.
    pub poison: Option<Poison>,
    /// Where the captured outputs come from; `None` in a case without outputs.
    pub device: Option<DeviceInfo>,
    /// SHA-256 of generated inputs, 64 lower-case hex digits.
    pub inputs_sha256: BTreeMap<Input, String>,
    /// SHA-256 of the whole caches after the run, under `KCache` and `VCache`.
    pub final_cache_sha256: BTreeMap<Input, String>,
}

/// The kernel that was run.
#[derive(Clone, Debug, PartialEq)]
pub enum Kernel {
    /// One decode step of one layer.
    DecodeLayer(Box<DecodeCase>),
    /// Prefill of prompts, then decode steps of all layers.
    Tokens(TokensCase),
}

/// What only a `decode_layer` case has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeCase {
    /// Batch metadata.
    pub batch: Batch,
}

/// What only a `tokens` case has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokensCase {
    /// Token ids of each active row.
    pub prompts: Vec<Vec<usize>>,
    /// Decode steps after the prefill; each row gets `1 + decode_steps` tokens.
    pub decode_steps: usize,
    /// Page of each logical block of the active rows, -1 where unused.
    pub block_table: Vec<Vec<i32>>,
}

/// What padding rows hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Padding {
    /// Row 0's hidden state.
    ReplicateRow0,
    /// Their own hidden states.
    Own,
}

impl Padding {
    /// The word in case files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ReplicateRow0 => "replicate_row0",
            Self::Own => "own",
        }
    }
}

/// What fills cache slots that no context holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Poison {
    /// `kv_beyond_context: nan`: NaN past each active row's context, in the page of its last token.
    KvBeyondContextNan,
}

/// Where captured outputs come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Real or emulated.
    pub kind: DeviceKind,
    /// Revision of the kernel sources.
    pub kernel_revision: Option<String>,
    /// ULPs by which an emulated device's exp is off, where it says so.
    pub exp_ulp: Option<u32>,
    /// The kernel to launch on a device of this machine, where the file names one.
    pub kernel: Option<Box<Launch>>,
}

/// Kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The kernel's source executed operator by operator on a CPU.
    Emulated,
    /// Real hardware.
    Npu,
}

impl DeviceKind {
    /// The word in case files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Emulated => "emulated",
            Self::Npu => "npu",
        }
    }
}

/// File name of a case inside its bundle.
pub const CASE_FILE: &str = "case.yaml";

impl Case {
    /// Reads a case file, or the `case.yaml` of a bundle directory.
    ///
    /// # Errors
    /// An unreadable file, or the first rule of `docs/bundles.md` that it breaks.
    pub fn load(path: &Path) -> Result<Self, CaseError> {
        let file = if path.is_dir() { path.join(CASE_FILE) } else { path.to_owned() };
        Self::parse(&read_text(&file)?, &file)
    }

    /// Reads the text of a case file; `path` is where it came from.
    ///
    /// # Errors
    /// The first rule of `docs/bundles.md` that it breaks.
    pub fn parse(text: &str, path: &Path) -> Result<Self, CaseError> {
        check::case(text, path)
    }

    /// The directory that holds the case file: the bundle.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// Batch metadata; only a `decode_layer` case has it.
    #[must_use]
    pub fn batch(&self) -> Option<&Batch> {
        match &self.kernel {
            Kernel::DecodeLayer(decode) => Some(&decode.batch),
            Kernel::Tokens(_) => None,
        }
    }

    /// What the shapes of inputs depend on besides the geometry.
    #[must_use]
    pub fn extent(&self) -> Extent {
        Extent { layers: self.layers, max_seq: self.max_seq, pages: self.pages }
    }

    /// Entries of a block-table row.
    #[must_use]
    pub fn max_blocks(&self) -> usize {
        self.max_seq.div_ceil(PAGE)
    }

    /// The inputs that the kernel reads, RoPE tables included, in the order of case files.
    pub fn inputs(&self) -> impl Iterator<Item = Input> + use<> {
        let kernel = self.kernel.kind();
        Input::ALL.into_iter().filter(move |&input| kernel.reads(input))
    }
}

/// Kernels that a case can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelKind {
    /// `decode_layer`
    DecodeLayer,
    /// `tokens`
    Tokens,
}

impl KernelKind {
    /// The word in case files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DecodeLayer => "decode_layer",
            Self::Tokens => "tokens",
        }
    }

    /// Whether the kernel reads `input`.
    #[must_use]
    pub fn reads(self, input: Input) -> bool {
        match self {
            Self::DecodeLayer => input.of_decode_layer(),
            Self::Tokens => input.of_tokens(),
        }
    }
}

impl Kernel {
    /// Which kernel it is.
    #[must_use]
    pub fn kind(&self) -> KernelKind {
        match self {
            Self::DecodeLayer(_) => KernelKind::DecodeLayer,
            Self::Tokens(_) => KernelKind::Tokens,
        }
    }
}
