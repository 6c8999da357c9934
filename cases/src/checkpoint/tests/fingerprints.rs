//! Fingerprints of checkpoints: the numbers tell, and nothing about how they are stored does.

use super::*;

fn of(edit: &Edit) -> Fingerprint {
    edit.open().fingerprint(&|_, _| ())
}

#[test]
fn how_the_numbers_are_stored_does_not_tell() {
    let mut edit = Edit::new();
    let first = of(&edit);
    edit.shard();
    assert_eq!(of(&edit), first);
    fs::remove_file(edit.path(INDEX_FILE)).unwrap();
    for name in [EMBEDDING, HEAD, NORM, Q_SCALE] {
        let (_, shape, bytes) = &edit.tensors[name];
        let wide = floats(bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()));
        edit.tensors.insert(name.into(), (Dtype::F32, shape.clone(), wide));
        edit.write();
        assert_eq!(of(&edit), first, "{name}");
    }
    // Data at an odd address, which is copied before it is used.
    fs::write(edit.path(SINGLE_FILE), edit.file(|_| true, 1)).unwrap();
    assert_eq!(of(&edit), first);
    // A head that is tied is the embedding, as is one that repeats it.
    let embedding = edit.tensors[EMBEDDING].clone();
    edit.tensors.insert(HEAD.into(), embedding);
    edit.write();
    let repeated = of(&edit);
    assert_ne!(repeated, first);
    edit.tensors.remove(HEAD);
    edit.write();
    edit.config(|config| config["tie_word_embeddings"] = true.into());
    assert_eq!(of(&edit), repeated);
    // Stop ids are no part of what is computed.
    edit.config(|config| config["eos_token_id"] = 3.into());
    assert_eq!(of(&edit), repeated);
}

#[test]
fn every_number_tells() {
    let mut edit = Edit::new();
    let mut seen = vec![of(&edit)];
    for name in [Q, Q_SCALE, NORM, EMBEDDING, HEAD, FINAL_NORM] {
        *edit.tensors.get_mut(name).unwrap().2.first_mut().unwrap() ^= 1;
        edit.write();
        seen.push(of(&edit));
    }
    edit.config(|config| config["rms_norm_eps"] = 1e-5.into());
    seen.push(of(&edit));
    edit.config(|config| config["rope_theta"] = 1e4.into());
    seen.push(of(&edit));
    let count = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), count);
}
