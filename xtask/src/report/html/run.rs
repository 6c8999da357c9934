//! What was run, what it was made from, and how this report was made.

use cases::{Case, Kernel};
use maud::{Markup, html};
use reference::{BATCH, Geometry, PAGE};

use super::super::text::{grouped, plain, plural, quoted};
use super::{Facts, scrolling};

/// Contexts or prompts that are listed before the rest is counted.
const FEW: usize = 16;

/// Geometry and batch.
pub fn case(case: &Case) -> Markup {
    let sizes = sizes(&case.geometry);
    let name = case.geometry_name.as_deref().map_or("of its own".into(), plain);
    html! {
        h3 { "What was run" }
        dl {
            dt { "kernel" } dd { code { (case.kernel.kind().name()) } ", " (plural(case.layers as u64, "layer")) }
            dt { "geometry" } dd { (name) ": " (sizes) }
            dt { "active rows" } dd { (case.active_batch) " of " (BATCH) ", padding " code { (case.padding.name()) } }
            @match &case.kernel {
                Kernel::DecodeLayer(decode) => {
                    dt { "contexts" } dd { (list(decode.batch.seq_lens.iter().take(case.active_batch))) }
                }
                Kernel::Tokens(run) => {
                    dt { "prompts" } dd {
                        (list(run.prompts.iter().map(Vec::len).collect::<Vec<_>>().iter())) " tokens, then "
                        (plural(run.decode_steps as u64, "decode step"))
                    }
                }
            }
            dt { "cache" } dd {
                (plural(case.pages as u64, "page")) " of " (PAGE) " slots, contexts up to "
                (grouped(case.max_seq as u64))
                @if case.poison.is_some() { ", NaN past the contexts" }
            }
        }
        @if let Some(batch) = case.batch() {
            details {
                summary { "Rows of the batch" }
                (scrolling("Rows of the batch", html! {
                    table {
                        thead { tr {
                            th.number scope="col" { "row" } th scope="col" { "is" } th.number scope="col" { "context" }
                            th.number scope="col" { "page written" } th.number scope="col" { "slot of the page" }
                        } }
                        tbody {
                            @for (row, (context, slot)) in batch.seq_lens.iter().zip(&batch.slots).enumerate() {
                                tr {
                                    th.number scope="row" { (row) }
                                    td { @if row < batch.active { "active" } @else { "padding" } }
                                    td.number { (context) } td.number { (slot / PAGE) } td.number { (slot % PAGE) }
                                }
                            }
                        }
                    }
                }))
            }
        }
    }
}

fn sizes(geometry: &Geometry) -> String {
    format!(
        "hidden {}, {} query and {} KV heads of {}, MLP {}",
        grouped(geometry.hidden_size as u64),
        geometry.num_attention_heads,
        geometry.num_key_value_heads,
        geometry.head_dim,
        grouped(geometry.intermediate_size as u64)
    )
}

fn list<'a>(numbers: impl ExactSizeIterator<Item = &'a usize>) -> String {
    let more = numbers.len().saturating_sub(FEW);
    let shown: Vec<String> = numbers.take(FEW).map(|number| grouped(*number as u64)).collect();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

/// Seeds, recipes and hashes of the inputs.
pub fn provenance(case: &Case) -> Markup {
    html! {
        dl {
            @if let Some(device) = &case.device {
                dt { "device" } dd {
                    (device.kind.name())
                    @if let Some(ulps) = device.exp_ulp { ", exp off by up to " (ulps) " ULP" }
                }
                dt { "kernel revision" } dd { (device.kernel_revision.as_deref().map_or("not stated".into(), plain)) }
            }
            dt { "seed" } dd { (case.seed) }
        }
        details {
            summary { "Inputs: recipes and hashes" }
            (scrolling("Inputs", html! {
                table {
                    thead { tr { th scope="col" { "input" } th scope="col" { "recipe" } th scope="col" { "SHA-256" } } }
                    tbody {
                        @for input in case.inputs() {
                            @let recipe = case.tensors.get(&input).map_or("computed".to_owned(), ToString::to_string);
                            @let hash = case.inputs_sha256.get(&input).map_or("not stated".into(), |hash| plain(hash));
                            tr {
                                th scope="row" { (input.name()) }
                                td { (recipe) }
                                td { code { (hash) } }
                            }
                        }
                    }
                }
            }))
        }
    }
}

/// Program, kernels, command.
pub fn facts(facts: &Facts) -> Markup {
    let command: Vec<String> = facts.command.iter().map(|argument| quoted(argument)).collect();
    html! {
        dl {
            dt { "program" } dd { "assay " (plain(&facts.version)) }
            dt { "reference kernels" } dd { code { (plain(&facts.kernels)) } ", with the bits of every other level" }
            dt { "false alarm" } dd { (facts.false_alarm) ": the chance that right kernels fail a run" }
            dt { "command" } dd { code { (plain(&command.join(" "))) } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_counted() {
        let numbers: Vec<usize> = (0..20).collect();
        assert!(list(numbers.iter()).ends_with("14, 15 and 4 more"));
        assert_eq!(list([1, 1000].iter()), "1, 1,000");
    }
}
