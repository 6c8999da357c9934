//! Text as token ids and back: a model's `tokenizer.json`, by Hugging Face's own library. No chat template is applied and
//! no special token is added: a prompt is the text as it stands, in which special tokens may be spelled out.

use std::path::{Path, PathBuf};

use thiserror::Error;

/// The tokenizer's file in a checkpoint's directory.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Longest such file. That of a vocabulary of 150,000 is 11 MB.
const LONGEST: u64 = 256 << 20;

/// A tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).finish_non_exhaustive()
    }
}

/// Why text and ids cannot be turned into one another.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum TokenizerError {
    #[error("{}: cannot be read: {error}", path.display())]
    Io { path: PathBuf, error: std::io::Error },
    #[error("{}: is no tokenizer: {why}; name the tokenizer.json that came with the model", path.display())]
    Format { path: PathBuf, why: String },
    #[error("{}: cannot encode the text: {why}", path.display())]
    Encode { path: PathBuf, why: String },
    #[error("{}: cannot decode the ids: {why}", path.display())]
    Decode { path: PathBuf, why: String },
    #[error("the text is empty, and a prompt needs at least one token")]
    Empty,
}

impl Tokenizer {
    /// Opens a `tokenizer.json`, or the one in a directory.
    ///
    /// # Errors
    /// The file cannot be read, or is no tokenizer.
    pub fn open(path: &Path) -> Result<Self, TokenizerError> {
        let path = if path.is_dir() { path.join(TOKENIZER_FILE) } else { path.to_owned() };
        let failed = |error| TokenizerError::Io { path: path.clone(), error };
        let metadata = std::fs::metadata(&path).map_err(failed)?;
        let wrong = |why: String| TokenizerError::Format { path: path.clone(), why: why.chars().take(500).collect() };
        if !metadata.is_file() {
            return Err(wrong("it is not a regular file".to_owned()));
        }
        if metadata.len() > LONGEST {
            return Err(wrong(format!("it is {} bytes long, more than {LONGEST}", metadata.len())));
        }
        let bytes = std::fs::read(&path).map_err(failed)?;
        let inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| wrong(error.to_string()))?;
        Ok(Self { inner, path })
    }

    /// Whether a directory holds a tokenizer.
    #[must_use]
    pub fn is_in(dir: &Path) -> bool {
        dir.join(TOKENIZER_FILE).symlink_metadata().is_ok()
    }

    /// The ids of a text.
    ///
    /// # Errors
    /// The text is empty, or the tokenizer has no ids for it.
    pub fn encode(&self, text: &str) -> Result<Vec<usize>, TokenizerError> {
        let failed =
            |error: tokenizers::Error| TokenizerError::Encode { path: self.path.clone(), why: error.to_string() };
        let encoding = self.inner.encode_fast(text, false).map_err(failed)?;
        let ids: Vec<usize> = encoding.get_ids().iter().map(|&id| id as usize).collect();
        if ids.is_empty() { Err(TokenizerError::Empty) } else { Ok(ids) }
    }

    /// The text of ids, special tokens spelled out. Bytes that are no whole character, as at the end of a sequence that
    /// was cut, and ids that the tokenizer does not know become U+FFFD.
    ///
    /// # Errors
    /// The tokenizer cannot decode.
    pub fn decode(&self, ids: &[usize]) -> Result<String, TokenizerError> {
        let failed =
            |error: tokenizers::Error| TokenizerError::Decode { path: self.path.clone(), why: error.to_string() };
        let known = |id: &u32| self.inner.id_to_token(*id).is_some();
        let ids: Vec<Option<u32>> = ids.iter().map(|&id| u32::try_from(id).ok().filter(known)).collect();
        let mut text = String::new();
        // The library drops ids that it does not know; their place is worth seeing.
        for (index, run) in ids.split(Option::is_none).enumerate() {
            if index > 0 {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            let run: Vec<u32> = run.iter().flatten().copied().collect();
            text.push_str(&self.inner.decode(&run, false).map_err(failed)?);
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte-level tokenizer of a few words, as a model's file has it.
    const SMALL: &str = r#"{
        "version": "1.0", "truncation": null, "padding": null, "normalizer": {"type": "NFC"},
        "added_tokens": [{"id": 8, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "(?i:'s|'t)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s+(?!\\S)|\\s+"},
             "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4, "ä": 5, "½": 6, "ł": 7},
                  "merges": ["a b", "Ġ ab"]}
    }"#;

    fn small() -> (tempfile::TempDir, Tokenizer) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(TOKENIZER_FILE), SMALL).unwrap();
        let tokenizer = Tokenizer::open(dir.path()).unwrap();
        (dir, tokenizer)
    }

    #[test]
    fn text_becomes_ids_and_text_again() {
        let (_dir, tokenizer) = small();
        assert_eq!(tokenizer.encode("ab ab a<|end|>").unwrap(), [3, 4, 2, 0, 8]);
        assert_eq!(tokenizer.decode(&[3, 4, 2, 0, 8]).unwrap(), "ab ab a<|end|>");
    }

    #[test]
    fn what_is_no_character_or_no_token_is_seen() {
        let (_dir, tokenizer) = small();
        // The first two of three bytes.
        assert_eq!(tokenizer.decode(&[3, 5, 6]).unwrap(), "ab\u{fffd}");
        assert_eq!(tokenizer.decode(&[3, 800, 4, usize::MAX]).unwrap(), "ab\u{fffd} ab\u{fffd}");
        assert_eq!(tokenizer.decode(&[]).unwrap(), "");
    }

    #[test]
    fn what_is_wrong_is_told_with_the_file() {
        let (dir, tokenizer) = small();
        assert!(Tokenizer::is_in(dir.path()));
        assert!(matches!(tokenizer.encode(""), Err(TokenizerError::Empty)));
        let path = dir.path().join("broken.json");
        for text in ["", "{}", "[1", "{\"model\": 3}"] {
            std::fs::write(&path, text).unwrap();
            let message = Tokenizer::open(&path).unwrap_err().to_string();
            assert!(message.contains("broken.json: is no tokenizer"), "{text}: {message}");
        }
        std::fs::remove_file(dir.path().join(TOKENIZER_FILE)).unwrap();
        assert!(!Tokenizer::is_in(dir.path()));
        let message = Tokenizer::open(dir.path()).unwrap_err().to_string();
        assert!(message.contains("tokenizer.json: cannot be read"), "{message}");
    }

    /// The field's standing prompt, where a model's own tokenizer is at hand.
    #[test]
    fn the_tokenizer_of_qwen3_reads_the_standing_prompt() {
        let Some(dir) = std::env::var_os("ASSAY_FIXTURES").map(|dir| Path::new(&dir).join("tokenizer")) else {
            println!("skipped: ASSAY_FIXTURES names no directory that holds tokenizer/tokenizer.json");
            return;
        };
        let tokenizer = Tokenizer::open(&dir).unwrap();
        let (text, ids) = ("介绍一下北京故宫", vec![109_432, 68_990, 113_508]);
        assert_eq!(tokenizer.encode(text).unwrap(), ids);
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(tokenizer.decode(&[9370, 99_893]).unwrap(), "的建筑");
    }
}
