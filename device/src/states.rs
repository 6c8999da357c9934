//! Hidden states after single layers of a token run, as they were captured: any subset, in one safetensors file or several
//! (`docs/bundles.md`, Layer states).
//!
//! Names, types and shapes are checked before any data is read, and no state may be given twice, so that memory follows
//! the case and not the files' claims.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use cases::header::Header;
use cases::{Case, Kernel, write_atomically};
use half::bf16;
use ndarray::{Array2, Array3, Axis};
use safetensors::{Dtype, SafeTensors};

use crate::captures::{CaptureError, CaptureFault, Element as _, type_name};
use crate::write::Sink;

/// What names of layer states begin with.
const PREFIX: &str = "layer_hidden.";
/// The word for the prefill in a name.
const PREFILL: &str = "prefill";
/// Files of one directory that are read.
const MOST_FILES: usize = 1 << 16;

/// When a state was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Moment {
    /// By the prefill, all prompt tokens at once.
    Prefill,
    /// By a decode step, counted from 0 as in `decode_hidden`.
    Step(usize),
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefill => f.write_str(PREFILL),
            Self::Step(step) => write!(f, "{step}"),
        }
    }
}

impl std::str::FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == PREFILL {
            return Ok(Self::Prefill);
        }
        decimal(text).map(Self::Step).ok_or_else(|| format!("expected `{PREFILL}` or a decode step, counted from 0"))
    }
}

/// The name of a state in a file.
#[must_use]
pub fn state_name(layer: usize, moment: Moment) -> String {
    format!("{PREFIX}{layer}.{moment}")
}

/// Sizes that a token run's states have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSizes {
    /// Layers that ran.
    pub layers: usize,
    /// Active rows.
    pub rows: usize,
    /// Decode steps.
    pub decode_steps: usize,
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Width of a state.
    pub hidden: usize,
}

impl StateSizes {
    /// The sizes of a case; `None` where it is none of kernel `tokens`.
    #[must_use]
    pub fn of(case: &Case) -> Option<Self> {
        let Kernel::Tokens(tokens) = &case.kernel else { return None };
        Some(Self {
            layers: case.layers,
            rows: tokens.prompts.len(),
            decode_steps: tokens.decode_steps,
            prompt_tokens: tokens.prompts.iter().map(Vec::len).sum(),
            hidden: case.geometry.hidden_size,
        })
    }

    /// Rows of a state: one a prompt token, or one an active row.
    #[must_use]
    pub fn rows_of(&self, moment: Moment) -> usize {
        match moment {
            Moment::Prefill => self.prompt_tokens,
            Moment::Step(_) => self.rows,
        }
    }
}

/// States after layers, BF16 `[rows, H]` each, by layer and moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerStates {
    /// The states. Those of the prefill have a row for each prompt token, prompts one after the other in row order.
    pub states: BTreeMap<(usize, Moment), Array2<bf16>>,
}

/// What a name of a file says that its tensor holds.
enum Holds {
    /// One moment of a layer.
    One(usize, Moment),
    /// All decode steps of a layer.
    Steps(usize),
}

impl LayerStates {
    /// Reads a file, or every `.safetensors` file of a directory.
    ///
    /// # Errors
    /// A file cannot be read or is no valid safetensors file; a tensor has an unknown name, another type than BF16 or a
    /// wrong shape, or a state is given twice. The message names file and tensor, and what was expected.
    pub fn open(path: &Path, sizes: &StateSizes) -> Result<Self, CaptureError> {
        let failed = |fault| CaptureError { path: path.to_path_buf(), fault: Box::new(fault) };
        let mut all = Self::default();
        let mut from: BTreeMap<(usize, Moment), PathBuf> = BTreeMap::new();
        for file in files(path).map_err(failed)? {
            let failed = |fault| CaptureError { path: file.clone(), fault: Box::new(fault) };
            let held = read(&file, sizes, &from).map_err(failed)?;
            from.extend(held.states.keys().map(|&key| (key, file.clone())));
            all.states.extend(held.states);
        }
        Ok(all)
    }
}

/// Writes states, each as a tensor of its own, so that [`LayerStates::open`] reads the same back.
///
/// # Errors
/// The file system refuses.
pub fn write_layer_states(path: &Path, states: &LayerStates) -> Result<(), CaptureError> {
    let failed = |fault| CaptureError { path: path.to_path_buf(), fault: Box::new(fault) };
    let mut sink = Sink::default();
    for (&(layer, moment), values) in &states.states {
        sink.values(&state_name(layer, moment), values);
    }
    let bytes = sink.assemble(&BTreeMap::new()).map_err(failed)?;
    write_atomically(path, &bytes).map_err(|error| failed(error.into()))
}

/// The files under a path, sorted by name.
fn files(path: &Path) -> Result<Vec<PathBuf>, CaptureFault> {
    if !std::fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let file = entry?.path();
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(file);
        }
    }
    if files.is_empty() || files.len() > MOST_FILES {
        return Err(CaptureFault::StateFiles { found: files.len(), most: MOST_FILES });
    }
    files.sort();
    Ok(files)
}

/// A decimal number in the one way of writing it.
fn decimal(text: &str) -> Option<usize> {
    text.parse().ok().filter(|number: &usize| number.to_string() == text)
}

/// What a name says.
fn holds(name: &str) -> Option<Holds> {
    let rest = name.strip_prefix(PREFIX)?;
    match rest.split_once('.') {
        None => Some(Holds::Steps(decimal(rest)?)),
        Some((layer, moment)) => Some(Holds::One(decimal(layer)?, moment.parse().ok()?)),
    }
}

fn read(
    path: &Path,
    sizes: &StateSizes,
    from: &BTreeMap<(usize, Moment), PathBuf>,
) -> Result<LayerStates, CaptureFault> {
    // Asked before opening: opening a pipe waits for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(CaptureFault::NotAFile);
    }
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let header = Header::read(&mut file, length)?;
    let mut tensors: BTreeMap<String, Holds> = BTreeMap::new();
    let mut seen: BTreeMap<(usize, Moment), &str> = BTreeMap::new();
    for (name, entry) in &header.tensors {
        let tensor = || name.clone();
        let Some(held) = holds(name) else { return Err(CaptureFault::UnknownState { tensor: tensor() }) };
        let (layer, moments, expected) = match held {
            Holds::One(layer, moment) => (layer, vec![moment], vec![sizes.rows_of(moment), sizes.hidden]),
            Holds::Steps(layer) => {
                let steps = (0..sizes.decode_steps).map(Moment::Step).collect();
                (layer, steps, vec![sizes.decode_steps, sizes.rows, sizes.hidden])
            }
        };
        if layer >= sizes.layers {
            return Err(CaptureFault::StateLayer { tensor: tensor(), layer, layers: sizes.layers });
        }
        if let Holds::One(_, Moment::Step(step)) = held
            && step >= sizes.decode_steps
        {
            return Err(CaptureFault::StateStep { tensor: tensor(), step, steps: sizes.decode_steps });
        }
        if entry.dtype != Dtype::BF16 {
            return Err(CaptureFault::StateType { tensor: tensor(), found: type_name(entry.dtype) });
        }
        if entry.shape != expected {
            let (found, expected) = (entry.shape.clone(), format!("{expected:?}"));
            return Err(CaptureFault::Shape { tensor: tensor(), found, expected });
        }
        for moment in moments {
            let state = state_name(layer, moment);
            if let Some(other) = seen.insert((layer, moment), name) {
                return Err(CaptureFault::StateTwice { tensor: tensor(), state, other: format!("`{other}`") });
            }
            if let Some(other) = from.get(&(layer, moment)) {
                return Err(CaptureFault::StateTwice { tensor: tensor(), state, other: other.display().to_string() });
            }
        }
        tensors.insert(tensor(), held);
    }
    file.seek(SeekFrom::Start(0))?;
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes)?;
    let source = SafeTensors::deserialize(&bytes)?;
    let mut all = LayerStates::default();
    for (name, held) in tensors {
        let view = source.tensor(&name)?;
        let (values, shape) = (bf16::decode(view.data()), view.shape().to_vec());
        let misshapen = || CaptureFault::Shape {
            tensor: name.clone(),
            found: shape.clone(),
            expected: "what its header says".to_owned(),
        };
        match held {
            Holds::One(layer, moment) => {
                let size = (sizes.rows_of(moment), sizes.hidden);
                let values = Array2::from_shape_vec(size, values).map_err(|_| misshapen())?;
                all.states.insert((layer, moment), values);
            }
            Holds::Steps(layer) => {
                let size = (sizes.decode_steps, sizes.rows, sizes.hidden);
                let values = Array3::from_shape_vec(size, values).map_err(|_| misshapen())?;
                for (step, values) in values.axis_iter(Axis(0)).enumerate() {
                    all.states.insert((layer, Moment::Step(step)), values.to_owned());
                }
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: StateSizes = StateSizes { layers: 3, rows: 2, decode_steps: 4, prompt_tokens: 7, hidden: 5 };

    fn state(layer: usize, moment: Moment) -> Array2<bf16> {
        let rows = SIZES.rows_of(moment);
        Array2::from_shape_fn((rows, 5), |(r, c)| bf16::from_f32((layer * 100 + r * 10 + c) as f32))
    }

    /// A file of some tensors, all zero.
    fn file(dir: &Path, name: &str, tensors: &[(&str, Dtype, Vec<usize>)]) -> PathBuf {
        let mut header = Header::default();
        let mut end = 0;
        for (name, dtype, shape) in tensors {
            let begin = end;
            end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let entry = cases::header::Entry { dtype: *dtype, shape: shape.clone(), data_offsets: (begin, end) };
            header.tensors.insert((*name).to_owned(), entry);
        }
        let mut bytes = header.encode().unwrap();
        bytes.resize(bytes.len() + end, 0);
        let path = dir.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn states_are_read_back_from_one_file_and_from_several() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = LayerStates::default();
        for key in [(0, Moment::Prefill), (2, Moment::Step(3)), (1, Moment::Step(0))] {
            all.states.insert(key, state(key.0, key.1));
        }
        let one = dir.path().join("one.safetensors");
        write_layer_states(&one, &all).unwrap();
        assert_eq!(LayerStates::open(&one, &SIZES).unwrap(), all);
        let several = tempfile::tempdir().unwrap();
        for (n, (&key, values)) in all.states.iter().enumerate() {
            let part = LayerStates { states: [(key, values.clone())].into() };
            write_layer_states(&several.path().join(format!("{n}.safetensors")), &part).unwrap();
        }
        std::fs::write(several.path().join("notes.txt"), "not a state").unwrap();
        assert_eq!(LayerStates::open(several.path(), &SIZES).unwrap(), all);
        // The stacked form is the same as its parts.
        let stacked = file(dir.path(), "stacked.safetensors", &[("layer_hidden.1", Dtype::BF16, vec![4, 2, 5])]);
        let read = LayerStates::open(&stacked, &SIZES).unwrap();
        let keys: Vec<_> = read.states.keys().copied().collect();
        assert_eq!(keys, (0..4).map(|step| (1, Moment::Step(step))).collect::<Vec<_>>());
        assert!(read.states.values().all(|values| values.dim() == (2, 5)));
    }

    #[test]
    fn what_is_no_state_of_this_run_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let bf16 = Dtype::BF16;
        for (tensors, said) in [
            (vec![("hidden.1.2", bf16, vec![2, 5])], "unknown tensor `hidden.1.2`"),
            (vec![("layer_hidden.01.2", bf16, vec![2, 5])], "unknown tensor `layer_hidden.01.2`"),
            (vec![("layer_hidden.1.+2", bf16, vec![2, 5])], "unknown tensor"),
            (vec![("layer_hidden.1.2.0", bf16, vec![2, 5])], "unknown tensor"),
            (vec![("layer_hidden.99999999999999999999.2", bf16, vec![2, 5])], "unknown tensor"),
            (vec![("layer_hidden.3.2", bf16, vec![2, 5])], "is of layer 3, but the run has layers 0 to 2"),
            (vec![("layer_hidden.1.4", bf16, vec![2, 5])], "is of decode step 4, but the run has 4"),
            (vec![("layer_hidden.1.2", Dtype::F32, vec![2, 5])], "has element type FP32, expected BF16"),
            (vec![("layer_hidden.1.2", bf16, vec![5, 2])], "has shape [5, 2]; expected [2, 5]"),
            (vec![("layer_hidden.1", bf16, vec![2, 4, 5])], "expected [4, 2, 5]"),
            (vec![("layer_hidden.1.prefill", bf16, vec![2, 5])], "expected [7, 5]"),
            (
                vec![("layer_hidden.1", bf16, vec![4, 2, 5]), ("layer_hidden.1.2", bf16, vec![2, 5])],
                "holds `layer_hidden.1.2`, which `layer_hidden.1` holds too",
            ),
        ] {
            let path = file(dir.path(), "states.safetensors", &tensors);
            let error = LayerStates::open(&path, &SIZES).unwrap_err().to_string();
            assert!(error.contains(said) && error.contains("states.safetensors"), "{error}");
        }
        std::fs::write(dir.path().join("states.safetensors"), "short").unwrap();
        assert!(LayerStates::open(dir.path(), &SIZES).unwrap_err().to_string().contains("cut short"));
    }

    #[test]
    fn a_state_of_two_files_and_an_empty_directory_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = LayerStates::open(dir.path(), &SIZES).unwrap_err().to_string();
        assert!(error.contains("holds 0 files"), "{error}");
        for name in ["a.safetensors", "b.safetensors"] {
            file(dir.path(), name, &[("layer_hidden.1.2", Dtype::BF16, vec![2, 5])]);
        }
        let error = LayerStates::open(dir.path(), &SIZES).unwrap_err().to_string();
        assert!(error.contains("b.safetensors") && error.contains("a.safetensors holds too"), "{error}");
        assert!(LayerStates::open(&dir.path().join("none"), &SIZES).is_err());
    }
}
