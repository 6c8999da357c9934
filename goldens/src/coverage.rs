//! What the data could not have shown: a pass says no more than its data allow.

use std::collections::BTreeSet;

use cases::{Case, DeviceKind};
use half::bf16;
use reference::geometry::AMAX_FLOOR;
use reference::stages::{Output, STAGES};
use reference::{BATCH, LayerInputs, PAGE, Site, TILE, TensorId, Trace};

use crate::Mark;
use crate::compare::passes_exact_int;
use crate::evidence::Evidence;
use crate::place::counted;
use crate::rules::Rules;
use crate::tally::Comparison;

/// What is gathered while stages are compared.
#[derive(Clone, Debug, Default)]
pub struct Coverage {
    projections: bool,
    large_sums: bool,
    quantized: bool,
    floored: bool,
}

impl Coverage {
    /// Notes what a compared stage exercised.
    pub fn see(&mut self, output: &Output, inputs: &LayerInputs<'_>, known: &Trace) {
        use TensorId as T;
        match output.id {
            T::QProj | T::KProj | T::VProj | T::AttnProjFp32 | T::GateAccAll | T::UpAccAll => {
                self.projections = true;
                self.large_sums |= passes_exact_int(output, inputs, known);
            }
            T::ActScales | T::AttnOutScales | T::MlpActScales => {
                self.quantized = true;
                let least = AMAX_FLOOR / reference::geometry::INT8_MAX;
                self.floored |= (0..BATCH).any(|row| output.tensor.get(row, 0) == least);
            }
            _ => {}
        }
    }

    /// The remarks, most telling first.
    pub fn remarks(
        &self,
        inputs: &LayerInputs<'_>,
        evidence: &Evidence,
        rules: &Rules,
        comparisons: &[Comparison],
    ) -> Vec<String> {
        let batch = inputs.batch;
        let contexts = &batch.seq_lens[..batch.active];
        let mut remarks = Vec::new();
        let mut say = |when: bool, text: String| {
            if when {
                remarks.push(text);
            }
        };

        let unforced = comparisons.iter().filter(|c| !c.forced);
        let sampled: Vec<String> = unforced
            .map(|c| match c.count(Mark::Flip) {
                0 => c.id.name().to_owned(),
                // How weak such a pass is shows in how much had to be excused.
                n => format!("{} ({n} of {} elements differ, as sampled devices do)", c.id.name(), c.marks.len()),
            })
            .collect();
        say(
            !sampled.is_empty(),
            format!(
                "judged against sampled devices, not from its own inputs: {}; a change smaller than permitted freedoms \
                 make would not show there",
                sampled.join(", ")
            ),
        );
        for (id, name) in [(TensorId::KRows, "k_written_rows"), (TensorId::VRows, "v_written_rows")] {
            say(!evidence.tensors.contains_key(&id), format!("{}: that cache was not judged", evidence.absent(name)));
        }
        say(batch.active == BATCH, "no padding row: what a kernel puts into padding rows was not exercised".to_owned());
        let same_padding = batch.active < BATCH
            && (batch.active..BATCH).all(|b| inputs.hidden_states.row(b) == inputs.hidden_states.row(0));
        say(
            same_padding,
            "padding rows replicate row 0: a kernel that treats them as real rows gives the same output".to_owned(),
        );
        say(batch.active == 1, "one active row: exchanged rows could not show".to_owned());
        say(
            contexts.iter().all(|&n| n == 1),
            "one key only in every context: softmax and its combination over tiles were not exercised".to_owned(),
        );
        say(contexts.iter().all(|&n| n <= TILE), "no context crosses a tile of 16 tokens".to_owned());
        say(contexts.iter().all(|&n| n <= PAGE), "no context crosses a page: page walks were not exercised".to_owned());
        say(
            contexts.iter().all(|&n| n.is_multiple_of(TILE)),
            "every context fills its last tile: the tail mask was not exercised".to_owned(),
        );
        let in_order = (0..batch.active).all(|b| {
            let used = batch.seq_lens[b].div_ceil(PAGE);
            batch.block_table[b][..used.min(batch.block_table[b].len())].iter().enumerate().all(|(i, &p)| p == i as i32)
        });
        say(in_order, "logical and physical pages coincide: taking one for the other could not show".to_owned());
        say(
            !self.poisoned(inputs),
            "slots beyond the contexts hold finite numbers: NaN leaking from them through V could not show".to_owned(),
        );
        say(
            self.projections && !self.large_sums,
            "INT32 sums stayed below 2^24: their conversion to FP32 was exact, and FP32 accumulation could not show"
                .to_owned(),
        );
        say(self.quantized && !self.floored, "no row reached the amax floor of 1e-4".to_owned());

        // Sites of compared stages whose ties never told the rules apart.
        let compared: BTreeSet<TensorId> = comparisons.iter().map(|c| c.id).collect();
        for stage in STAGES.iter().filter(|stage| stage.writes.iter().any(|id| compared.contains(id))) {
            for &site in stage.sites.iter().filter(|&&site| !rules.exercised(site)) {
                say(
                    true,
                    match (site, rules.ties(site)) {
                        (Site::Prob, _) => "prob is narrowed inside attention: its tie rule cannot be seen".to_owned(),
                        (_, 0) if site.is_int8() => {
                            format!("no exact tie at {}: its rounding mode was not exercised", site.name())
                        }
                        (_, 0) => format!("no exact tie at {}: its tie rule was not exercised", site.name()),
                        (_, n) => format!(
                            "{n} exact ties at {}, none of which tells the rules apart: its tie rule was not exercised",
                            site.name()
                        ),
                    },
                );
            }
        }
        remarks
    }

    /// Whether some slot past a context, in a tile that is read, holds a number that is not finite in V.
    fn poisoned(&self, inputs: &LayerInputs<'_>) -> bool {
        (0..inputs.batch.active).any(|b| !poisoned_slots(inputs, b, true).is_empty())
    }
}

/// Slots past the context of row `b`, in the tile that its last token lies in, whose V (or K) is not finite.
pub fn poisoned_slots(inputs: &LayerInputs<'_>, b: usize, values: bool) -> Vec<usize> {
    let context = inputs.batch.seq_lens[b];
    let cache = if values { inputs.cache.v } else { inputs.cache.k };
    let slots = (context..context.next_multiple_of(TILE)).filter_map(|position| inputs.batch.slot_of(b, position));
    slots
        .filter(|&slot| {
            (0..inputs.geometry.num_key_value_heads).any(|kv_head| {
                let row = reference::inputs::cache_row(inputs.geometry, slot, kv_head);
                cache.row(row).iter().any(|value: &bf16| !value.is_finite())
            })
        })
        .collect()
}

/// Where the outputs come from, in a few words: the device's kind and the kernel's revision.
pub fn source(case: &Case) -> String {
    let Some(device) = &case.device else { return "not stated".to_owned() };
    let kind = match device.kind {
        DeviceKind::Emulated => "emulated",
        DeviceKind::Npu => "npu",
    };
    match &device.kernel_revision {
        Some(revision) => format!("{kind}, kernel {revision}"),
        None => kind.to_owned(),
    }
}

/// `slots 5064-5071 (page 39)`: slots with the pages they lie in.
pub fn slots_name(slots: &[usize]) -> String {
    let pages: BTreeSet<usize> = slots.iter().map(|slot| slot / PAGE).collect();
    let pages: Vec<usize> = pages.into_iter().collect();
    format!("{} ({})", counted("slot", slots), counted("page", &pages))
}
