//! The compared tensors: a table of counts, then each tensor with its notes, worst elements, maps and distances. Those
//! with a fault of their own are open.

use goldens::report::{CaseReport, Element, Number, TensorReport, Verdict};
use maud::{Markup, html};

use super::super::summary;
use super::super::text::{grouped, plain, plural};
use super::{distances, marks, plot, scrolling};

/// Table and tensors.
pub fn section(index: usize, case: &CaseReport) -> Markup {
    html! {
        @if !case.tensors.is_empty() {
            h3 { "Tensors" }
            (scrolling("Tensors", table(index, case)))
            @for (number, tensor) in case.tensors.iter().enumerate() {
                (one(&anchor(index, number), tensor, case))
            }
        }
    }
}

fn anchor(index: usize, number: usize) -> String {
    format!("case-{index}-tensor-{number}")
}

fn table(index: usize, case: &CaseReport) -> Markup {
    let counts = |tensor: &TensorReport| {
        [
            tensor.elements,
            tensor.exact,
            tensor.explained_flips,
            tensor.explained_ties,
            tensor.unexplained,
            tensor.nonfinite,
        ]
    };
    html! {
        table {
            caption { "In the contract's order; forced: recomputed from the device's own inputs to it" }
            thead { tr {
                th scope="col" { "tensor" } th scope="col" { "verdict" } th scope="col" { "forced" }
                @for heading in ["elements", "exact", "flips", "ties", "drift", "non-finite"] {
                    th.number scope="col" { (heading) }
                }
            } }
            tbody {
                @for (number, tensor) in case.tensors.iter().enumerate() {
                    tr {
                        th scope="row" { a href=(format!("#{}", anchor(index, number))) { (plain(&tensor.name)) } }
                        td { (marks::pill(tensor.verdict)) (role(tensor, case)) }
                        td { @if tensor.forced { "yes" } @else { "no" } }
                        @for count in counts(tensor) { td.number { (grouped(count)) } }
                    }
                }
            }
        }
    }
}

/// What a tensor is to the first divergence.
fn role(tensor: &TensorReport, case: &CaseReport) -> Markup {
    html! {
        @if case.first_divergence.as_deref() == Some(tensor.name.as_str()) { " " strong { "▶ first divergence" } }
        @else if case.consequences.contains(&tensor.name) { " " span.quiet { "↳ downstream" } }
    }
}

fn one(anchor: &str, tensor: &TensorReport, case: &CaseReport) -> Markup {
    let own = tensor.verdict != Verdict::Pass && !case.consequences.contains(&tensor.name);
    html! {
        details.tensor open[own] {
            summary {
                (marks::pill(tensor.verdict)) " " strong { (plain(&tensor.name)) } (role(tensor, case))
                " " span.quiet { (counts(tensor)) }
            }
            // A link to what is inside opens it.
            div id=(anchor) { (details(tensor)) }
        }
    }
}

fn counts(tensor: &TensorReport) -> String {
    if tensor.elements > 0 && tensor.exact == tensor.elements {
        return format!("{}, all exact", plural(tensor.elements, "element"));
    }
    let parts = plot::kinds([
        (tensor.exact, "exact"),
        (tensor.explained_flips, "flip"),
        (tensor.explained_ties, "tie"),
        (tensor.unexplained, "drift"),
        (tensor.nonfinite, "not finite"),
    ]);
    format!(
        "{}: {}",
        plural(tensor.elements, "element"),
        if parts.is_empty() { "none".into() } else { parts.join(", ") }
    )
}

fn details(tensor: &TensorReport) -> Markup {
    // A write beside the batch's slots is none of the tensor's elements.
    let strays = tensor.map.iter().flat_map(|map| &map.grids).any(plot::drifts);
    let exact = tensor.exact == tensor.elements && !strays;
    html! {
        @if !tensor.forced { p.quiet { "Not recomputed from the device's own inputs to it." } }
        @if let Some(places) = summary::places(tensor) { p { "Drift in " (places) "." } }
        @if tensor.exactly_half > 0 {
            p { (plural(tensor.exactly_half, "drifting element")) " exactly half of the contract's value." }
        }
        @if !tensor.notes.is_empty() { ul { @for note in &tensor.notes { li { (plain(note)) } } } }
        (elements(tensor))
        @match &tensor.map {
            Some(_) if exact => p.quiet { "Every element that was compared has the contract's bits." },
            Some(map) => div.maps {
                @for grid in &map.grids { (plot::map(grid)) }
                (distances::histogram(&map.distances))
            },
            None => {},
        }
    }
}

/// The worst drifting elements, or the worst explained one.
fn elements(tensor: &TensorReport) -> Markup {
    let elements: Vec<&Element> = if tensor.worst_elements.is_empty() {
        tensor.worst.iter().collect()
    } else {
        tensor.worst_elements.iter().collect()
    };
    let caption = if tensor.worst_elements.is_empty() { "Worst explained element" } else { "Worst elements" };
    html! {
        @if !elements.is_empty() {
            (scrolling(caption, html! {
                table {
                    caption { (caption) }
                    thead { tr {
                        th scope="col" { "index" } th.number scope="col" { "device" } th scope="col" { "bits" }
                        th.number scope="col" { "contract" } th scope="col" { "bits" }
                        th.number scope="col" { "ULPs apart" }
                    } }
                    tbody {
                        @for element in elements {
                            tr {
                                th scope="row" { (format!("{:?}", element.index)) }
                                td.number { (value(&element.device, &element.device_bits)) }
                                td { code { (plain(&element.device_bits)) } }
                                td.number { (value(&element.reference, &element.reference_bits)) }
                                td { code { (plain(&element.reference_bits)) } }
                                td.number { (element.ulps.map_or("–".to_owned(), grouped)) }
                            }
                        }
                    }
                }
            }))
        }
    }
}

/// A value; ids and cache rows as the integers that their bits are.
fn value(value: &Number, bits: &str) -> String {
    match bits {
        "absent" => "–".to_owned(),
        bits => summary::integer(bits).map_or_else(|| value.to_string(), |number| number.to_string()),
    }
}
