//! A small synthetic checkpoint for tests of whole runs.

use cases::Checkpoint;
use cases::checkpoint::{Synthesis, synthesize};
use cases::seeded::{Rope, rope};
use ndarray::Array2;
use reference::Geometry;

/// A checkpoint in a directory of its own.
pub struct Model {
    _dir: tempfile::TempDir,
    pub checkpoint: Checkpoint,
    pub rope: [Array2<f32>; 2],
}

pub fn model() -> Model {
    let dir = tempfile::tempdir().unwrap();
    let geometry = Geometry {
        hidden_size: 64,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 16,
        intermediate_size: 96,
        num_hidden_layers: 2,
        vocab_size: 100,
        real_vocab_size: 100,
        rms_norm_eps: 1e-6,
    };
    let path = dir.path().join("model");
    synthesize(&path, &Synthesis { geometry, seed: 11, replace: false }, &mut |_, _| {}).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let table = |which| rope(which, 64, 16, checkpoint.rope_theta()).unwrap();
    let rope = [table(Rope::Cos), table(Rope::Sin)];
    Model { _dir: dir, checkpoint, rope }
}
