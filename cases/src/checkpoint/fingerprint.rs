//! What tells one model from another: a hash over everything that fixes its outputs, and over nothing else, so that
//! other shards, other names of files or a moved directory leave it as it is.

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::Checkpoint;

impl Checkpoint {
    /// SHA-256, in hexadecimal, over the sizes, the rotary base, and name, type, shape and bytes of every tensor in the
    /// order of their names. Reads every weight once.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        let geometry = self.geometry();
        let mut hash = Sha256::new();
        hash.update(format!(
            "assay model 1\n{} {} {} {} {} {} {} {} {:08x} {:016x} {}\n",
            geometry.hidden_size,
            geometry.num_attention_heads,
            geometry.num_key_value_heads,
            geometry.head_dim,
            geometry.intermediate_size,
            geometry.num_hidden_layers,
            geometry.vocab_size,
            geometry.real_vocab_size,
            geometry.rms_norm_eps.to_bits(),
            self.rope_theta().to_bits(),
            self.tied(),
        ));
        let places: Vec<_> = self.shards.tensors.iter().collect();
        // Tensors are hashed on all threads, and their hashes in the order of their names.
        let digests: Vec<_> = places.par_iter().map(|(_, place)| Sha256::digest(self.shards.bytes(place))).collect();
        for ((name, place), digest) in places.iter().zip(digests) {
            hash.update(format!("{name} {} {:?} ", place.dtype, place.shape));
            hash.update(digest);
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use reference::Geometry;

    use crate::checkpoint::{Checkpoint, Synthesis, synthesize};

    #[test]
    fn another_place_is_the_same_model_and_another_seed_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str, seed: u64, layers: usize| {
            let geometry = Geometry {
                hidden_size: 32,
                num_attention_heads: 2,
                num_key_value_heads: 1,
                head_dim: 16,
                intermediate_size: 32,
                num_hidden_layers: layers,
                vocab_size: 20,
                real_vocab_size: 20,
                rms_norm_eps: 1e-6,
            };
            let path = dir.path().join(name);
            synthesize(&path, &Synthesis { geometry, seed, replace: false }, &mut |_, _| {}).unwrap();
            Checkpoint::open(&path).unwrap().fingerprint()
        };
        let first = of("a", 1, 1);
        assert_eq!(first.len(), 64);
        assert_eq!(first, of("b", 1, 1));
        assert_ne!(first, of("c", 2, 1));
        assert_ne!(first, of("d", 1, 2));
        let config = dir.path().join("a/config.json");
        let text = std::fs::read_to_string(&config).unwrap();
        let changed = text.replace("1e-06", "1e-05").replace("1e-6", "1e-5").replace("0.000001", "0.00001");
        assert_ne!(text, changed);
        std::fs::write(&config, changed).unwrap();
        assert_ne!(first, Checkpoint::open(&dir.path().join("a")).unwrap().fingerprint());
    }
}
