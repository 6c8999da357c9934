//! A greedy run that may be interrupted: its choices and its cache in a file, from which the same request goes on and
//! gives the bits that it would have given in one piece.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cases::header::{Entry, Header, HeaderError};
use cases::write_atomically;
use half::bf16;
use reference::generate::{Choice, Decoder, GenerateError};
use reference::model::{PagedCache, Weights};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

/// Key of the run in the file's metadata.
const KEY: &str = "assay_run";
/// Key of the SHA-256 over the run and the tensors' bytes: a file that has been damaged would go on to other tokens.
const CHECKSUM: &str = "assay_sha256";

/// Everything that decides what a run gives. Runs go on from files of equal requests only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Fingerprint of the model.
    pub model: String,
    /// Prompt ids of each row.
    pub prompts: Vec<Vec<usize>>,
    /// Tokens that a row may generate.
    pub max_new_tokens: usize,
    /// Tokens that a row may have, its prompt included.
    pub max_seq_len: usize,
    /// Ids after which a row ends.
    pub stop_ids: Vec<usize>,
    /// Rounding rules by site.
    pub policy: BTreeMap<String, String>,
}

/// Where a run stands.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Standing {
    request: Request,
    prefilled: usize,
    /// Choices of each row; their candidates are in [`CHOICES`], row by row.
    choices: Vec<usize>,
}

/// Tensors of the choices' candidates: ids, INT64, and logits, FP32, both `[choices, candidates]`.
const CHOICES: [&str; 2] = ["choice_ids", "choice_logits"];

/// Why a run cannot go on from a file, or be kept in it.
#[derive(Debug, Error)]
#[error("{}: {fault}", path.display())]
pub struct RunStateError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub fault: Box<RunStateFault>,
}

/// What is wrong with the file of a run.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum RunStateFault {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Header(#[from] HeaderError),
    #[error("is not a regular file; name one, or a file that is not there yet")]
    NoFile,
    #[error("has been damaged: its SHA-256 is not the one it says; remove it to begin anew")]
    Damaged,
    #[error("holds no unfinished run: {0}; name another file, or remove it to begin anew")]
    NoRun(String),
    #[error("holds a run of another request ({0} differs); name another file, or remove it to begin anew")]
    Other(&'static str),
    #[error("tensor {tensor}: {found}, expected {expected}; remove the file to begin anew")]
    Tensor { tensor: String, found: String, expected: String },
    #[error("{0}; remove the file to begin anew")]
    Standing(#[from] GenerateError),
}

/// Keeps where `decoder` stands, whole or not at all.
///
/// # Errors
/// What the file system says.
pub fn save<W: Weights>(path: &Path, request: &Request, decoder: &Decoder<'_, W>) -> Result<(), RunStateError> {
    let failed = |fault| RunStateError { path: path.to_path_buf(), fault: Box::new(fault) };
    let rows = decoder.sequences();
    let standing = Standing {
        request: request.clone(),
        prefilled: decoder.prefilled(),
        choices: rows.iter().map(|row| row.choices.len()).collect(),
    };
    let json = serde_json::to_string(&standing).map_err(|error| failed(io::Error::from(error).into()))?;
    let (mut header, mut data) = (Header::default(), Vec::new());
    let mut add = |name: String, dtype: Dtype, shape: [usize; 2], bytes: &mut dyn Iterator<Item = u8>| {
        let start = data.len();
        data.extend(bytes);
        header.tensors.insert(name, Entry { dtype, shape: shape.to_vec(), data_offsets: (start, data.len()) });
    };
    let choices = || rows.iter().flat_map(|row| &row.choices);
    let candidates = || choices().flat_map(|choice| &choice.top);
    let [ids, logits] = CHOICES;
    let shape = [choices().count(), choices().next().map_or(0, |choice| choice.top.len())];
    add(ids.to_owned(), Dtype::I64, shape, &mut candidates().flat_map(|&(id, _)| (id as i64).to_le_bytes()));
    add(logits.to_owned(), Dtype::F32, shape, &mut candidates().flat_map(|(_, logit)| logit.to_le_bytes()));
    for (name, values, shape) in tensors(decoder.cache()) {
        add(name, Dtype::BF16, shape, &mut values.iter().flat_map(|value| value.to_le_bytes()));
    }
    header.metadata = BTreeMap::from([(CHECKSUM.to_owned(), checksum(&json, &data)), (KEY.to_owned(), json)]);
    let mut bytes = header.encode().map_err(|error| failed(error.into()))?;
    bytes.extend(data);
    write_atomically(path, &bytes).map_err(|error| failed(error.into()))
}

/// Takes `decoder`, which has not begun, to where the run in the file stood. False when there is no such file.
///
/// # Errors
/// The file is malformed, or holds the run of another request.
pub fn load<W: Weights>(path: &Path, request: &Request, decoder: &mut Decoder<'_, W>) -> Result<bool, RunStateError> {
    let failed = |fault| RunStateError { path: path.to_path_buf(), fault: Box::new(fault) };
    // A link would be replaced by the next file and not followed, a pipe would be waited for.
    match path.symlink_metadata() {
        Ok(found) if found.is_file() => {}
        Ok(_) => return Err(failed(RunStateFault::NoFile)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(failed(error.into())),
    }
    let bytes = fs::read(path).map_err(|error| failed(error.into()))?;
    restore(&bytes, request, decoder).map_err(failed)?;
    Ok(true)
}

fn restore<W: Weights>(bytes: &[u8], request: &Request, decoder: &mut Decoder<'_, W>) -> Result<(), RunStateFault> {
    let header = Header::read(bytes, bytes.len() as u64)?;
    let json = header.metadata.get(KEY).ok_or_else(|| RunStateFault::NoRun(format!("no {KEY} in its metadata")))?;
    let data = &bytes[bytes.len() - header.data_length()..];
    if header.metadata.get(CHECKSUM) != Some(&checksum(json, data)) {
        return Err(RunStateFault::Damaged);
    }
    let standing: Standing =
        serde_json::from_str(json).map_err(|error| RunStateFault::NoRun(format!("{KEY}: {error}")))?;
    same(&standing.request, request)?;
    let count: usize = standing.choices.iter().sum();
    let width = header.tensors.get(CHOICES[0]).and_then(|entry| entry.shape.get(1)).copied().unwrap_or(0);
    let candidates = CHOICES.into_iter().zip([Dtype::I64, Dtype::F32]);
    let candidates = candidates.map(|(name, dtype)| (name.to_owned(), dtype, [count, width]));
    let caches = tensors(decoder.cache()).into_iter().map(|(name, _, shape)| (name, Dtype::BF16, shape));
    let mut kept: BTreeMap<String, &[u8]> = BTreeMap::new();
    for (name, dtype, shape) in candidates.chain(caches) {
        let expected = format!("{dtype:?} {shape:?}");
        let wrong = |found| RunStateFault::Tensor { tensor: name.clone(), found, expected: expected.clone() };
        let entry = header.tensors.get(&name).ok_or_else(|| wrong("absent".into()))?;
        if entry.dtype != dtype || entry.shape != shape {
            return Err(wrong(format!("{:?} {:?}", entry.dtype, entry.shape)));
        }
        kept.insert(name, &data[entry.data_offsets.0..entry.data_offsets.1]);
    }
    if let Some(name) = header.tensors.keys().find(|name| !kept.contains_key(*name)) {
        let (found, expected) = ("present".to_owned(), "no such tensor".to_owned());
        return Err(RunStateFault::Tensor { tensor: name.clone(), found, expected });
    }
    let [ids, logits] = CHOICES.map(|name| kept.get(name).copied().unwrap_or_default());
    let candidates = ids.as_chunks::<8>().0.iter().zip(logits.as_chunks::<4>().0);
    let candidates: Vec<(usize, f32)> = candidates
        // An id that is none is refused with those beyond the vocabulary.
        .map(|(id, logit)| (usize::try_from(i64::from_le_bytes(*id)).unwrap_or(usize::MAX), f32::from_le_bytes(*logit)))
        .collect();
    let mut all = candidates.chunks_exact(width.max(1)).map(|top| Choice { top: top.to_vec() });
    let choices = standing.choices.iter().map(|&count| all.by_ref().take(count).collect()).collect();
    decoder.resume(choices, standing.prefilled, |cache| {
        for layer in 0.. {
            let Some(caches) = cache.layer_mut(layer) else { break };
            for (mut cache, name) in caches.into_iter().zip(names(layer)) {
                let values = kept.get(&name).into_iter().flat_map(|bytes| bytes.chunks_exact(2));
                cache.iter_mut().zip(values).for_each(|(to, from)| *to = bf16::from_le_bytes([from[0], from[1]]));
            }
        }
    })?;
    Ok(())
}

/// Refuses the run of another request, by what differs.
fn same(found: &Request, asked: &Request) -> Result<(), RunStateFault> {
    let parts = [
        ("the model", found.model == asked.model),
        ("a prompt", found.prompts == asked.prompts),
        ("max_new_tokens", found.max_new_tokens == asked.max_new_tokens),
        ("max_seq_len", found.max_seq_len == asked.max_seq_len),
        ("a stop id", found.stop_ids == asked.stop_ids),
        ("the policy", found.policy == asked.policy),
    ];
    parts.iter().find(|(_, equal)| !equal).map_or(Ok(()), |(what, _)| Err(RunStateFault::Other(what)))
}

/// SHA-256 of the run and the tensors' bytes, in hexadecimal.
fn checksum(run: &str, data: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(run);
    hash.update(data);
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn names(layer: usize) -> [String; 2] {
    [format!("k_cache.{layer}"), format!("v_cache.{layer}")]
}

/// The caches of every layer under their names, layer by layer, each with its shape.
fn tensors(cache: &PagedCache) -> Vec<(String, &[bf16], [usize; 2])> {
    let mut tensors = Vec::new();
    let mut layer = 0;
    while let Some(caches) = cache.layer(layer) {
        for (name, values) in names(layer).into_iter().zip([caches.k, caches.v]) {
            let (rows, columns) = values.dim();
            tensors.push((name, values.to_slice().unwrap_or_default(), [rows, columns]));
        }
        layer += 1;
    }
    tensors
}

#[cfg(test)]
mod tests {
    use super::*;
    use cases::Checkpoint;
    use cases::checkpoint::{Synthesis, synthesize};
    use cases::seeded::{Rope, rope};
    use reference::generate::Limits;
    use reference::{Geometry, Policy};

    fn checkpoint(dir: &Path) -> Checkpoint {
        let geometry = Geometry {
            hidden_size: 32,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 8,
            intermediate_size: 48,
            num_hidden_layers: 2,
            vocab_size: 40,
            real_vocab_size: 40,
            rms_norm_eps: 1e-6,
        };
        let synthesis = Synthesis { geometry, seed: 5, replace: false };
        synthesize(&dir.join("model"), &synthesis, &mut |_, _| ()).unwrap();
        Checkpoint::open(&dir.join("model")).unwrap()
    }

    fn decoder(model: &Checkpoint) -> Decoder<'_, Checkpoint> {
        let table = |which| rope(which, 40, 8, 1e6).unwrap();
        let limits = Limits { max_new_tokens: 6, max_seq_len: 40, stop_ids: vec![] };
        let prompts = vec![vec![1, 2, 3], vec![4]];
        Decoder::new(model, [table(Rope::Cos), table(Rope::Sin)], prompts, limits, Policy::production()).unwrap()
    }

    fn request() -> Request {
        Request {
            model: "abc".into(),
            prompts: vec![vec![1, 2, 3], vec![4]],
            max_new_tokens: 6,
            max_seq_len: 40,
            stop_ids: vec![],
            policy: BTreeMap::new(),
        }
    }

    #[test]
    fn a_run_goes_on_from_its_file_with_the_same_bits() {
        let dir = tempfile::tempdir().unwrap();
        let (model, path) = (checkpoint(dir.path()), dir.path().join("run"));
        let mut whole = decoder(&model);
        assert!(!load(&path, &request(), &mut whole).unwrap());
        while whole.advance().unwrap() {}
        for steps in 0..7 {
            let mut first = decoder(&model);
            (0..steps).for_each(|_| assert!(first.advance().unwrap()));
            save(&path, &request(), &first).unwrap();
            // Headers may only be so long: what grows with a run is in tensors.
            let length = u64::from_le_bytes(fs::read(&path).unwrap()[..8].try_into().unwrap());
            assert!(length < 1100, "{length}");
            let mut second = decoder(&model);
            assert!(load(&path, &request(), &mut second).unwrap());
            assert_eq!(second.sequences(), first.sequences());
            while second.advance().unwrap() {}
            assert_eq!(second.sequences(), whole.sequences());
        }
    }

    #[test]
    fn other_requests_and_other_files_are_refused_by_what_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let (model, path) = (checkpoint(dir.path()), dir.path().join("run"));
        let mut run = decoder(&model);
        run.advance().unwrap();
        save(&path, &request(), &run).unwrap();
        let refusal = |request: &Request| load(&path, request, &mut decoder(&model)).unwrap_err().to_string();
        let of = |change: &dyn Fn(&mut Request)| {
            let mut request = request();
            change(&mut request);
            refusal(&request)
        };
        assert!(of(&|request| request.model = "abd".into()).contains("(the model differs)"));
        assert!(of(&|request| request.stop_ids = vec![3]).contains("(a stop id differs)"));
        assert!(of(&|request| request.prompts[1] = vec![5]).contains("(a prompt differs)"));

        let good = fs::read(&path).unwrap();
        let text = String::from_utf8_lossy(&good).into_owned();
        let replaced = |from: &str, to: &str| {
            assert_eq!(from.len(), to.len());
            assert!(text.contains(from), "{from}");
            let at = good.windows(from.len()).position(|bytes| bytes == from.as_bytes()).unwrap();
            let mut bytes = good.clone();
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            fs::write(&path, bytes).unwrap();
            refusal(&request())
        };
        assert!(replaced("k_cache.1", "k_cache.7").contains("tensor k_cache.1: absent"));
        assert!(replaced("assay_run", "assay_ran").contains("no assay_run"));
        assert!(replaced("prefilled\\\":128", "prefilled\\\":  2").contains("damaged"));
        let mut flipped = good.clone();
        *flipped.last_mut().unwrap() ^= 64;
        fs::write(&path, flipped).unwrap();
        assert!(refusal(&request()).contains("damaged"));
        for length in [0, 7, 100, good.len() - 1] {
            fs::write(&path, &good[..length]).unwrap();
            assert!(!refusal(&request()).is_empty());
        }
        #[cfg(unix)]
        {
            fs::write(&path, &good).unwrap();
            let link = dir.path().join("link");
            std::os::unix::fs::symlink(&path, &link).unwrap();
            let error = load(&link, &request(), &mut decoder(&model)).unwrap_err().to_string();
            assert!(error.contains("not a regular file"), "{error}");
        }
        fs::write(&path, b"{}").unwrap();
        assert!(refusal(&request()).starts_with(&path.display().to_string()));
    }
}
