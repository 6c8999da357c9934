//! Things in a case that are legal but suspicious: rows that write over one another, contexts that are
//! written into, sizes that the production kernels cannot run.

use std::fmt::Write as _;

use reference::{BATCH, Batch, DType, PAGE, Tensor};

use crate::case::{Case, Padding};
use crate::input::Input;
use crate::seeded;

impl Case {
    /// What is legal in this case but suspicious, each in one sentence.
    ///
    /// Rows that share a slot are named where they would write different bytes there: serving's padding
    /// rows, which repeat row 0 in everything, are expected.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for rule in self.geometry.tiling_violations() {
            warnings.push(format!(
                "the production kernels cannot run this geometry, which breaks {rule}; columns would stay unwritten"
            ));
        }
        if let Some(batch) = self.batch() {
            self.shared_slots(batch, &mut warnings);
            written_contexts(batch, &mut warnings);
        }
        let unchecked = self.inputs().filter(|input| !self.inputs_sha256.contains_key(input)).map(Input::name);
        let unchecked: Vec<&str> = unchecked.collect();
        if self.device.is_some() && !unchecked.is_empty() {
            warnings.push(format!(
                "inputs_sha256 has no hash of {}: nothing shows that the device was given these tensors",
                unchecked.join(", ")
            ));
        }
        warnings
    }

    /// Pairs of rows, one of them padding at least, that write different bytes to one slot.
    fn shared_slots(&self, batch: &Batch, warnings: &mut Vec<String>) {
        let states = self.hidden_states();
        let alike = |a: usize, b: usize| {
            let same_state = states.as_ref().is_some_and(|states| states.get(a) == states.get(b));
            // Keys are rotated by the position.
            same_state && batch.seq_lens[a] == batch.seq_lens[b]
        };
        for row in batch.active..BATCH {
            let Some(other) = (0..row).find(|&other| batch.slots[other] == batch.slots[row] && !alike(other, row))
            else {
                continue;
            };
            let kind = if other < batch.active { "active" } else { "padding" };
            let slot = batch.slots[row];
            warnings.push(format!(
                "padding row {row} and {kind} row {other} write different keys and values to slot {slot} (page {}, offset \
                 {}): which of them stays depends on their order",
                slot / PAGE,
                slot % PAGE,
            ));
        }
    }

    /// Bit patterns of each row's hidden state, as the kernel is given it.
    fn hidden_states(&self) -> Option<Vec<Vec<u16>>> {
        let recipe = self.tensors.get(&Input::HiddenStates)?;
        let shape = Input::HiddenStates.shape(&self.geometry, self.extent());
        let name = Input::HiddenStates.name();
        let Ok(Tensor::Bf16(values)) = seeded::tensor(self.seed, name, DType::Bf16, shape, recipe) else { return None };
        let row = |row: usize| {
            let replicated = row >= self.active_batch && self.padding == Padding::ReplicateRow0;
            values.row(if replicated { 0 } else { row }).iter().map(|value| value.to_bits()).collect()
        };
        Some((0..BATCH).map(row).collect())
    }
}

/// Rows whose slot lies inside the context of an active row, other than at that row's own place.
fn written_contexts(batch: &Batch, warnings: &mut Vec<String>) {
    for row in 0..BATCH {
        let slot = batch.slots[row];
        let mut hit = String::new();
        for reader in (0..batch.active).filter(|&reader| reader != row) {
            // The token being decoded is the reader's own write: sharing that slot is another warning.
            let position = (0..batch.position(reader)).find(|&position| batch.slot_of(reader, position) == Some(slot));
            if let Some(position) = position {
                let comma = if hit.is_empty() { "" } else { ", " };
                // Writing to a string cannot fail.
                let _ = write!(hit, "{comma}position {position} of active row {reader}");
            }
        }
        if !hit.is_empty() {
            let kind = if row < batch.active { "active" } else { "padding" };
            warnings.push(format!("{kind} row {row} writes slot {slot}, which holds {hit}: a context is overwritten"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{DeviceInfo, DeviceKind, Kernel};
    use crate::new::{NewCase, new_case};
    use crate::recipe::{Recipe, RecipeKind};
    use reference::Geometry;

    fn case(active: usize, padding: Padding) -> Case {
        let seq_lens = [130, 77, 5][..active].to_vec();
        new_case(NewCase { active_batch: active, seq_lens, padding, ..NewCase::named("w", "mini").unwrap() }).unwrap()
    }

    fn batch(case: &mut Case) -> &mut Batch {
        match &mut case.kernel {
            Kernel::DecodeLayer(decode) => &mut decode.batch,
            Kernel::Tokens(_) => unreachable!("new cases are decode layers"),
        }
    }

    #[test]
    fn ordinary_cases_have_none() {
        assert_eq!(case(2, Padding::ReplicateRow0).warnings(), Vec::<String>::new());
        assert_eq!(case(2, Padding::Own).warnings(), Vec::<String>::new());
    }

    #[test]
    fn rows_that_overwrite_one_another_are_named() {
        let mut shared = case(2, Padding::Own);
        let slot = batch(&mut shared).slots[0];
        batch(&mut shared).slots[15] = slot;
        let warnings = shared.warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("padding row 15 and active row 0"), "{warnings:?}");

        // The same position and the same state: the same bytes.
        batch(&mut shared).seq_lens[15] = 130;
        assert_eq!(shared.warnings().len(), 1);
        shared.tensors.insert(Input::HiddenStates, Recipe::new(RecipeKind::Ones));
        assert_eq!(shared.warnings(), Vec::<String>::new());

        let mut padding = case(2, Padding::Own);
        let slot = batch(&mut padding).slots[4];
        batch(&mut padding).slots[9] = slot;
        assert!(padding.warnings()[0].contains("padding row 9 and padding row 4"));
    }

    #[test]
    fn a_replicated_row_at_another_position_is_named() {
        let mut shared = case(1, Padding::ReplicateRow0);
        batch(&mut shared).seq_lens[3] = 7;
        assert!(shared.warnings()[0].contains("padding row 3 and active row 0"));
    }

    #[test]
    fn writes_into_a_context_are_named() {
        let mut overwritten = case(2, Padding::Own);
        let slot = batch(&mut overwritten).slot_of(1, 40).unwrap();
        batch(&mut overwritten).slots[7] = slot;
        let warnings = overwritten.warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("padding row 7") && warnings[0].contains("position 40 of active row 1"));
    }

    #[test]
    fn unchecked_inputs_of_a_device_are_named() {
        let mut recorded = case(1, Padding::ReplicateRow0);
        recorded.device =
            Some(DeviceInfo { kind: DeviceKind::Npu, kernel_revision: None, exp_ulp: None, kernel: None });
        recorded.inputs_sha256 =
            recorded.inputs().filter(|&input| input != Input::Wk).map(|i| (i, "0".repeat(64))).collect();
        let warnings = recorded.warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("no hash of wk:"), "{warnings:?}");
    }

    #[test]
    fn geometries_that_the_kernels_cannot_run_are_named() {
        let mut narrow = case(1, Padding::ReplicateRow0);
        narrow.geometry = Geometry { hidden_size: 640, ..narrow.geometry };
        assert_eq!(narrow.warnings().len(), 2);
    }
}
