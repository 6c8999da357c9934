//! Which model a set of weights is: one SHA-256 over sizes and over the SHA-256 of every tensor as it is used, so that
//! neither the files that hold the tensors nor their order or types tell in it (`docs/checkpoints.md`, Fingerprint).

use std::fmt::{self, Write as _};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;
use reference::Geometry;
use safetensors::Dtype;
use sha2::{Digest as _, Sha256};

use crate::inputs::hex;

/// Bytes hashed between two words of progress.
const PART: usize = 16 << 20;

/// A model's fingerprint: 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint([u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is no fingerprint: expected 64 hexadecimal digits in lower case");
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let bytes: Option<Vec<u8>> = pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect();
        let bytes = bytes.filter(|_| rest.is_empty()).ok_or_else(wrong)?;
        bytes.try_into().map(Self).map_err(|_| wrong())
    }
}

/// A tensor as it is used.
#[derive(Clone, Debug)]
pub struct Named<'a> {
    /// Its name in Hugging Face's layout.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
    /// Its elements, little-endian, row-major.
    pub bytes: &'a [u8],
}

/// The fingerprint of a model of these sizes, rotary base and tensors, which may come in any order. Hashes tensors on
/// all threads; `progress` is told the bytes hashed so far and those of all tensors.
#[must_use]
pub fn fingerprint(
    geometry: &Geometry,
    rope_theta: f64,
    mut tensors: Vec<Named<'_>>,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Fingerprint {
    let total: u64 = tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum();
    let done = AtomicU64::new(0);
    // A tensor is hashed from its first byte to its last: the largest ones begin first, so that none is waited for.
    tensors.sort_by(|a, b| b.bytes.len().cmp(&a.bytes.len()).then_with(|| a.name.cmp(&b.name)));
    let line = |tensor: Named<'_>| {
        let mut hash = Sha256::new();
        for part in tensor.bytes.chunks(PART) {
            hash.update(part);
            progress(done.fetch_add(part.len() as u64, Ordering::Relaxed) + part.len() as u64, total);
        }
        let shape = tensor.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let line = format!("tensor {} [{shape}] {}", tensor.dtype, hex(&hash.finalize()));
        (tensor.name, line)
    };
    // The bridge hands tensors out one by one and in order, unlike a split in halves.
    let mut lines: Vec<(String, String)> = tensors.into_iter().par_bridge().map(line).collect();
    lines.sort_unstable();
    let mut text = description(geometry, rope_theta);
    for (name, line) in lines {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{line} {name}");
    }
    Fingerprint(Sha256::digest(text).into())
}

/// The lines before those of the tensors.
fn description(geometry: &Geometry, rope_theta: f64) -> String {
    let mut text = "model fingerprint 1\n".to_owned();
    for (name, value) in [
        ("hidden_size", geometry.hidden_size),
        ("num_attention_heads", geometry.num_attention_heads),
        ("num_key_value_heads", geometry.num_key_value_heads),
        ("head_dim", geometry.head_dim),
        ("intermediate_size", geometry.intermediate_size),
        ("num_hidden_layers", geometry.num_hidden_layers),
        ("vocab_size", geometry.real_vocab_size),
    ] {
        let _ = writeln!(text, "{name} {value}");
    }
    // By bits: decimals have more than one form.
    let _ = writeln!(text, "rms_norm_eps {:08x}", geometry.rms_norm_eps.to_bits());
    let _ = writeln!(text, "rope_theta {:016x}", rope_theta.to_bits());
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn named<'a>(name: &str, shape: &[usize], bytes: &'a [u8]) -> Named<'a> {
        Named { name: name.to_owned(), dtype: Dtype::I8, shape: shape.to_vec(), bytes }
    }

    #[test]
    fn it_is_the_hash_of_the_documented_text() {
        let geometry = Geometry::named("mini").unwrap();
        let lines = |text: &str| Fingerprint(Sha256::digest(text).into());
        let hash = |bytes: &[u8]| hex(&Sha256::digest(bytes));
        let text = format!(
            "model fingerprint 1\nhidden_size {}\nnum_attention_heads {}\nnum_key_value_heads {}\nhead_dim {}\n\
             intermediate_size {}\nnum_hidden_layers {}\nvocab_size {}\nrms_norm_eps 358637bd\nrope_theta \
             412e848000000000\ntensor I8 [2,1] {} a\ntensor I8 [3] {} b\n",
            geometry.hidden_size,
            geometry.num_attention_heads,
            geometry.num_key_value_heads,
            geometry.head_dim,
            geometry.intermediate_size,
            geometry.num_hidden_layers,
            geometry.real_vocab_size,
            hash(&[1, 2]),
            hash(&[3, 4, 5]),
        );
        let seen = Mutex::new(Vec::new());
        let progress = |done, total| seen.lock().unwrap().push((done, total));
        let tensors = || vec![named("b", &[3], &[3, 4, 5]), named("a", &[2, 1], &[1, 2])];
        let found = fingerprint(&geometry, 1e6, tensors(), &progress);
        assert_eq!(found, lines(&text));
        assert_eq!(found.to_string().parse(), Ok(found));
        assert_eq!(seen.into_inner().unwrap().into_iter().max(), Some((5, 5)));
        let other = |tensors| fingerprint(&geometry, 1e6, tensors, &|_, _| ());
        let reversed = tensors().into_iter().rev().collect();
        assert_eq!(other(reversed), found);
        // Everything that is told of a tensor tells.
        for (name, shape, bytes) in [("c", &[2, 1][..], &[1, 2]), ("a", &[1, 2], &[1, 2]), ("a", &[2, 1], &[1, 3])] {
            assert_ne!(other(vec![named("b", &[3], &[3, 4, 5]), named(name, shape, bytes)]), found);
        }
        assert_ne!(fingerprint(&geometry, 1e6 + 1.0, tensors(), &|_, _| ()), found);
        let eps = Geometry { rms_norm_eps: 1e-5, ..geometry.clone() };
        assert_ne!(fingerprint(&eps, 1e6, tensors(), &|_, _| ()), found);
    }

    #[test]
    fn what_is_no_fingerprint_is_refused() {
        for text in ["", "0", &"0".repeat(63), &"0".repeat(65), &"0".repeat(66), &"G".repeat(64), &"A".repeat(64)] {
            assert!(text.parse::<Fingerprint>().unwrap_err().contains("64 hexadecimal"));
        }
    }
}
