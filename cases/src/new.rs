//! New `decode_layer` cases from a few parameters: pages by the generator's permutation, slots, padding rows
//! and the usual recipes. What is built is checked like any case file.

use std::collections::BTreeMap;
use std::path::PathBuf;

use reference::geometry::GeometryError;
use reference::{BATCH, Batch, Geometry, PAGE};
use thiserror::Error;

use crate::case::{Case, DecodeCase, Kernel, Padding, Poison};
use crate::check::LARGEST_EXTENT;
use crate::error::CaseError;
use crate::input::Input;
use crate::policy::PolicyRequest;
use crate::recipe::{OutlierColumns, Recipe, RecipeKind};
use crate::seeded;

/// Parameters of a new case.
#[derive(Clone, Debug, PartialEq)]
pub struct NewCase {
    /// Its name; also the path of the case file it is meant for.
    pub name: String,
    /// Sizes of the model.
    pub geometry: Geometry,
    /// The geometry's name, where it has one.
    pub geometry_name: Option<String>,
    /// Layers, stacked.
    pub layers: usize,
    /// Seed of tensors and pages.
    pub seed: u64,
    /// Real rows, 1..=16.
    pub active_batch: usize,
    /// Context length of each active row, the token being decoded included.
    pub seq_lens: Vec<usize>,
    /// Longest context.
    pub max_seq: usize,
    /// KV pages; `None` for what 16 rows can address, and 4 to spare.
    pub pages: Option<usize>,
    /// What padding rows hold.
    pub padding: Padding,
    /// What fills cache slots past each context.
    pub poison: Option<Poison>,
}

/// Pages beyond those that 16 rows can address, for padding rows with slots of their own.
const SPARE_PAGES: usize = 4;

/// Why no case can be built.
#[derive(Debug, Error)]
pub enum NewCaseError {
    /// The geometry cannot be computed.
    #[error("geometry: {0}")]
    Geometry(#[from] GeometryError),
    /// A number of lengths other than that of active rows.
    #[error("{found} context lengths for {active} active rows; give one a row")]
    Lengths {
        /// Lengths given.
        found: usize,
        /// Active rows.
        active: usize,
    },
    /// More positions than any case may have.
    #[error("max_seq: {0} is more than the {LARGEST_EXTENT} this program takes")]
    MaxSeq(usize),
    /// A page of the permutation is not in the cache.
    #[error("{pages} pages, but the contexts and padding rows need {needed} with max_seq {max_seq}; give more pages")]
    Pages {
        /// Pages given.
        pages: usize,
        /// Pages needed.
        needed: usize,
        /// Longest context.
        max_seq: usize,
    },
    /// A rule of `docs/bundles.md` that the parameters break. Lines are those of the file that would be written.
    #[error("these parameters make no valid case: {}{}", .0.message(), .0.help().map(|help| format!("; {help}")).unwrap_or_default())]
    Rule(#[from] CaseError),
}

impl NewCase {
    /// One active row of 100 tokens on a named geometry; callers change what they want otherwise.
    #[must_use]
    pub fn named(name: &str, geometry: &str) -> Option<Self> {
        Some(Self {
            name: name.to_owned(),
            geometry: Geometry::named(geometry)?,
            geometry_name: Some(geometry.to_owned()),
            layers: 1,
            seed: 101,
            active_batch: 1,
            seq_lens: vec![100],
            max_seq: 512,
            pages: None,
            padding: Padding::ReplicateRow0,
            poison: None,
        })
    }
}

/// Builds a `decode_layer` case without device and without hashes; `Inputs::hashes` gives the latter.
///
/// # Errors
/// Parameters that make no valid case.
pub fn new_case(parameters: NewCase) -> Result<Case, NewCaseError> {
    let NewCase {
        name,
        geometry,
        geometry_name,
        layers,
        seed,
        active_batch,
        seq_lens,
        max_seq,
        pages,
        padding,
        poison,
    } = parameters;
    geometry.validate()?;
    if seq_lens.len() != active_batch || !(1..=BATCH).contains(&active_batch) {
        return Err(NewCaseError::Lengths { found: seq_lens.len(), active: active_batch });
    }
    if max_seq > LARGEST_EXTENT {
        return Err(NewCaseError::MaxSeq(max_seq));
    }
    let max_blocks = max_seq.div_ceil(PAGE);
    let addressed = BATCH * max_blocks;
    let pages = pages.unwrap_or(addressed + SPARE_PAGES);
    let padding = if active_batch == BATCH { Padding::Own } else { padding };
    let batch = batch(seed, &seq_lens, max_blocks, addressed, padding);
    let needed = batch.block_table.iter().flatten().max().map_or(0, |&page| page as usize + 1);
    if needed > pages {
        return Err(NewCaseError::Pages { pages, needed, max_seq });
    }
    let case = Case {
        path: PathBuf::from(crate::CASE_FILE),
        name,
        kernel: Kernel::DecodeLayer(Box::new(DecodeCase { batch })),
        geometry,
        geometry_name,
        layers,
        seed,
        max_seq,
        pages,
        rope_theta: 1e6,
        tensors: standard_recipes(),
        active_batch,
        padding,
        policy: PolicyRequest::Auto,
        policy_in_case: false,
        poison,
        device: None,
        inputs_sha256: BTreeMap::new(),
        final_cache_sha256: BTreeMap::new(),
    };
    Ok(Case::parse(&case.to_yaml(), &case.path)?)
}

/// Batch metadata. Row `b` has the pages from `b * max_blocks` on of the permutation. Padding rows repeat
/// row 0, or have a context of one token each in the first spare page, one slot a row.
fn batch(seed: u64, seq_lens: &[usize], max_blocks: usize, addressed: usize, padding: Padding) -> Batch {
    let active = seq_lens.len();
    let permutation = seeded::page_permutation(seed, addressed);
    let mut batch = Batch { active, seq_lens: [1; BATCH], block_table: Vec::new(), slots: [0; BATCH] };
    for row in 0..BATCH {
        let first = if row < active { row * max_blocks } else { 0 };
        let replicated = row >= active && padding == Padding::ReplicateRow0;
        if row < active || replicated {
            batch.seq_lens[row] = seq_lens[if replicated { 0 } else { row }];
            // Page numbers are below 2^20.
            let table = permutation.iter().skip(first).take(max_blocks).map(|&page| page as i32).collect();
            batch.block_table.push(table);
            batch.slots[row] =
                batch.seq_lens[row].checked_sub(1).and_then(|last| batch.slot_of(row, last)).unwrap_or(0);
        } else {
            batch.block_table.push(vec![addressed as i32; max_blocks]);
            batch.slots[row] = addressed * PAGE + row - active;
        }
    }
    batch
}

/// The recipes of the repository's own cases: weights as a checkpoint's, outlier columns in the hidden state.
#[must_use]
pub fn standard_recipes() -> BTreeMap<Input, Recipe> {
    let normal = |mean, std, bf16| Recipe::new(RecipeKind::Normal { mean, std, bf16 });
    let recipe = |input| match input {
        Input::HiddenStates => Recipe {
            outlier_columns: Some(OutlierColumns { period: 512, phase: 37, factor: 16.0 }),
            ..normal(0.0, 1.0, false)
        },
        Input::InputRmsWeight | Input::PostRmsWeight | Input::QNormWeight | Input::KNormWeight => {
            normal(1.0, 0.1, true)
        }
        Input::KCache | Input::VCache => normal(0.0, 1.0, false),
        Input::WDown => normal(0.0, 0.02, false),
        Input::Wq | Input::Wk | Input::Wv | Input::Wo | Input::WGate | Input::WUp => {
            Recipe::new(RecipeKind::Int8Normal { std: 32 })
        }
        _ => Recipe::new(RecipeKind::Uniform { lo: 3.125e-4, hi: 9.375e-4 }),
    };
    let drawn = Input::ALL.into_iter().filter(|input| input.of_decode_layer() && input.has_recipe());
    drawn.map(|input| (input, recipe(input))).collect()
}
