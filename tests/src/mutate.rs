//! A fuzzer that needs nothing but this repository: seeds changed at random, the same ones for the same number. It is not
//! guided by coverage, as the one of `fuzz/` is, and finds what lies near right files.

use std::fs;
use std::path::Path;

/// Numbers at which readers go wrong.
const EDGES: [u64; 14] = [
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
    1 << 32,
    i64::MAX as u64,
    u64::MAX,
];
/// Longest file that is made.
const LONGEST: usize = 4096;

/// A stream of changed files.
pub struct Mutations {
    seeds: Vec<Vec<u8>>,
    state: u64,
}

impl Mutations {
    /// Of the files in `tests/corpus` and `tests/samples` that are seeds for a reader.
    ///
    /// # Panics
    /// A folder cannot be read.
    #[must_use]
    pub fn of(target: &str, seed: u64) -> Self {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folders: &[(&str, &str)] = match target {
            "pt_legacy" => &[("samples/pt", ".legacy.pt")],
            "pt_zip" => &[("samples/pt", ".pt")],
            "npy" => &[("samples/npy", ".npy")],
            "npz" => &[("samples/npy", ".npz")],
            "case_yaml" => &[("../cases/tests/data", ".yaml")],
            _ => &[],
        };
        let corpus = format!("corpus/{target}");
        let mut names = Vec::new();
        for (folder, end) in folders.iter().copied().chain([(corpus.as_str(), "")]) {
            for entry in fs::read_dir(tests.join(folder)).unwrap() {
                let path = entry.unwrap().path();
                if path.to_string_lossy().ends_with(end) {
                    names.push(path);
                }
            }
        }
        names.sort();
        let seeds = names.iter().map(|path| fs::read(path).unwrap()).filter(|bytes| bytes.len() <= LONGEST).collect();
        Self { seeds, state: seed | 1 }
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, most: usize) -> usize {
        ((self.next() >> 33) as usize) % most.max(1)
    }

    /// The next file.
    pub fn file(&mut self) -> Vec<u8> {
        let seed = self.below(self.seeds.len());
        let mut bytes = self.seeds[seed].clone();
        for _ in 0..1 + self.below(6) {
            self.change(&mut bytes);
        }
        bytes.truncate(LONGEST);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        let (at, kind) = (self.below(bytes.len()), self.below(9));
        let rest = bytes.len() - at;
        match kind {
            0 if rest > 0 => bytes[at] ^= 1 << self.below(8),
            1 if rest > 0 => bytes[at] = self.next() as u8,
            2 => {
                let (edge, width) = (EDGES[self.below(EDGES.len())], 1 << self.below(4));
                for (to, from) in bytes.iter_mut().skip(at).zip(&edge.to_le_bytes()[..width]) {
                    *to = *from;
                }
            }
            3 => {
                let length = self.below(rest.min(32) + 1);
                bytes.drain(at..at + length);
            }
            4 => {
                let made: Vec<u8> = (0..1 + self.below(8)).map(|_| self.next() as u8).collect();
                bytes.splice(at..at, made);
            }
            5 => {
                let part: Vec<u8> = bytes[at..at + self.below(rest.min(64) + 1)].to_vec();
                let to = self.below(bytes.len() + 1);
                bytes.splice(to..to, part);
            }
            6 => {
                let other = self.below(self.seeds.len());
                let from = self.below(self.seeds[other].len());
                let end = (from + self.below(128)).min(self.seeds[other].len());
                let part = self.seeds[other][from..end].to_vec();
                bytes.splice(at..(at + self.below(rest.min(128) + 1)), part);
            }
            // A number in text becomes another one.
            7 => {
                if let Some(digit) = bytes.iter().skip(at).position(u8::is_ascii_digit) {
                    let edge = EDGES[self.below(EDGES.len())].to_string();
                    bytes.splice(at + digit..at + digit + 1, edge.bytes());
                }
            }
            _ => bytes.truncate(at.max(1)),
        }
    }
}
