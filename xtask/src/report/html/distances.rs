//! How far a tensor's values lie from the contract's, in units in the last place: a bar a bin, on a logarithmic scale.

use goldens::Mark;
use goldens::maps::{Cell, Distances};
use maud::{Markup, html};

use super::super::text::grouped;
use super::plot::{Paths, Shape, counts};

/// Pixels of the longest bar.
const LONGEST: f64 = 150.0;

/// The histogram.
pub fn histogram(distances: &Distances) -> Markup {
    let mut lines: Vec<(String, Cell)> =
        distances.bins.iter().enumerate().map(|(bin, cell)| (name(bin), *cell)).collect();
    if distances.none.elements() > 0 {
        lines.push(("not finite".to_owned(), distances.none));
    }
    let most = lines.iter().map(|(_, cell)| cell.elements()).max().unwrap_or(0);
    html! {
        @if most > 0 {
            figure {
                figcaption {
                    strong { "distance in ULPs" } " " span.quiet { "(bars grow with the logarithm of the count)" }
                }
                table.distances {
                    thead { tr {
                        th scope="col" { "ULPs" } th.bar scope="col" { span.hidden { "bar" } }
                        th scope="col" { "elements" }
                    } }
                    tbody {
                        @for (name, cell) in &lines {
                            tr { th scope="row" { (name) } td.bar { (bar(cell, most)) } td { (told(cell)) } }
                        }
                    }
                }
            }
        }
    }
}

/// `0`, `1`, `3–4`.
fn name(bin: usize) -> String {
    let [least, largest] = Distances::range(bin);
    if least == largest { grouped(least) } else { format!("{}–{}", grouped(least), grouped(largest)) }
}

/// The count alone where all of a bin is exact.
fn told(cell: &Cell) -> String {
    if cell.elements() == 0 { "0".to_owned() } else { counts(cell) }
}

fn bar(cell: &Cell, most: u64) -> Markup {
    let logarithm = |count: u64| (count as f64 + 1.0).ln();
    let length = (LONGEST * logarithm(cell.elements()) / logarithm(most)).round() as usize;
    let shape = match cell.worst() {
        Some(Mark::Drift) => Shape::Drift,
        Some(Mark::Tie) => Shape::Tie,
        Some(Mark::Flip) => Shape::Flip(1),
        _ => Shape::Exact,
    };
    let mut paths = Paths::default();
    if cell.elements() > 0 {
        paths.draw(shape, [0, 0], [length.max(2), 10]);
    }
    html! { svg width=(LONGEST as usize) height="10" aria-hidden="true" { (paths.markup()) } }
}
