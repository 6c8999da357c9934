//! Heat maps as inline SVG. Equal neighbours are drawn as one rectangle, so that a map's size follows from
//! what is in it.

use std::fmt::Write as _;

use goldens::Mark;
use goldens::maps::{Axis, Cell, Grid};
use maud::{Markup, html};

use super::super::text::{grouped, plural};
use super::{marks, scrolling};

/// What a cell is drawn as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shape {
    /// The ground alone.
    Exact,
    /// A bar in the middle, one of three heights.
    Flip(u8),
    /// A line above and one below.
    Tie,
    /// All of it.
    Drift,
}

/// Pixels left of the cells, for the rows' names.
const LEFT: usize = 76;
/// Pixels right of them, for a letter.
const RIGHT: usize = 18;
/// Pixels above them, for the columns' numbers.
const TOP: usize = 18;
/// Most columns whose numbers are written.
const NUMBERS: usize = 8;

impl Shape {
    /// The shape of a cell: its worst mark. `None` where nothing was compared.
    fn of(cell: &Cell) -> Option<Self> {
        Some(match cell.worst()? {
            Mark::Drift => Self::Drift,
            Mark::Tie => Self::Tie,
            Mark::Flip if cell.flips.saturating_mul(10) <= cell.elements() => Self::Flip(0),
            Mark::Flip if cell.flips.saturating_mul(2) <= cell.elements() => Self::Flip(1),
            Mark::Flip => Self::Flip(2),
            Mark::Exact | Mark::Skipped => Self::Exact,
        })
    }
}

/// Rectangles of one row of cells, by the class that colours them.
#[derive(Debug, Default)]
pub struct Paths {
    exact: String,
    flip: String,
    tie: String,
    drift: String,
}

impl Paths {
    /// Draws `width` by `height` pixels at `x`, `y` as a shape on its ground.
    pub fn draw(&mut self, shape: Shape, at: [usize; 2], size: [usize; 2]) {
        self.mark(Shape::Exact, at, size);
        if shape != Shape::Exact {
            self.mark(shape, at, size);
        }
    }

    /// Draws a shape alone.
    fn mark(&mut self, shape: Shape, [x, y]: [usize; 2], [width, height]: [usize; 2]) {
        let rectangle = |path: &mut String, y: usize, height: usize| {
            let _ = write!(path, "M{x} {y}h{width}v{height}h-{width}z");
        };
        match shape {
            Shape::Drift => rectangle(&mut self.drift, y, height),
            Shape::Exact => rectangle(&mut self.exact, y, height),
            Shape::Flip(level) => {
                let bar = (height * (usize::from(level) + 1) / 4).max(1);
                rectangle(&mut self.flip, y + (height - bar) / 2, bar);
            }
            Shape::Tie => {
                let line = (height / 4).max(1);
                rectangle(&mut self.tie, y, line);
                rectangle(&mut self.tie, y + height - line, line);
            }
        }
    }

    /// The paths, the ground first.
    pub fn markup(&self) -> Markup {
        let paths = [("x", &self.exact), ("f", &self.flip), ("t", &self.tie), ("d", &self.drift)];
        html! { @for (class, path) in paths { @if !path.is_empty() { path class=(class) d=(path) {} } } }
    }
}

/// A cell of a shape, as text has it.
pub fn sample(shape: Shape) -> Markup {
    let mut paths = Paths::default();
    paths.draw(shape, [0, 0], [18, 12]);
    html! { svg width="18" height="12" aria-hidden="true" { (paths.markup()) } }
}

/// A map in a box of its own.
pub fn map(grid: &Grid) -> Markup {
    let (down, across) = (grid.down.bins.len(), grid.across.bins.len());
    let (cell, line) = (if across <= 32 { 14 } else { 6 }, if down <= 16 { 13 } else { 8 });
    let (width, height) = (LEFT + cell * across + RIGHT, TOP + line * down);
    let title = format!("{} by {}", grid.down.name, grid.across.name);
    let named = line >= 12;
    let svg = html! {
        svg.map width=(width) height=(height) role="img" aria-label=(format!("{title}: {}", said(grid))) {
            @for (index, label) in numbers(&grid.across) {
                text.n x=(LEFT + index * cell) y=(TOP - 6) { (label) }
            }
            @for (index, (range, cells)) in grid.rows().enumerate() {
                @let y = TOP + index * line;
                @let sum = sum(cells);
                g {
                    title { (grid.down.name) " " (ends(range)) ": " (counts(&sum)) }
                    @if named || index.is_multiple_of(4) {
                        text.n.e x=(LEFT - 6) y=(y + if named { 10 } else { 7 }) { (ends(range)) }
                    }
                    (row(cells, [LEFT, y], [cell, line - 1]).markup())
                    @if let Some(mark @ (Mark::Drift | Mark::Tie)) = sum.worst() {
                        text class=(if mark == Mark::Drift { "l d" } else { "l t" })
                            x=(LEFT + cell * across + 5) y=(y + if named { 10 } else { 8 }) { (marks::letter(mark)) }
                    }
                }
            }
        }
    };
    html! {
        figure {
            figcaption { strong { (title) } " " span.quiet { (binned(grid)) } br; span.quiet { (said(grid)) } }
            (scrolling(&title, svg))
        }
    }
}

/// A row of cells; neighbours of one shape are one rectangle, and so is the ground below all that was compared.
fn row(cells: &[Cell], [x, y]: [usize; 2], [cell, height]: [usize; 2]) -> Paths {
    let mut paths = Paths::default();
    let shapes: Vec<Option<Shape>> = cells.iter().map(Shape::of).collect();
    let ground: Vec<Option<Shape>> = shapes.iter().map(|shape| shape.map(|_| Shape::Exact)).collect();
    for (shapes, ground) in [(&ground, true), (&shapes, false)] {
        let mut next = 0;
        for run in shapes.chunk_by(|a, b| a == b) {
            if let Some(&Some(shape)) = run.first()
                && (ground || shape != Shape::Exact)
            {
                paths.mark(shape, [x + next * cell, y], [run.len() * cell, height]);
            }
            next += run.len();
        }
    }
    paths
}

/// The columns that have their number written.
fn numbers(axis: &Axis) -> impl Iterator<Item = (usize, usize)> + '_ {
    let every = axis.bins.len().div_ceil(NUMBERS).max(1);
    axis.bins.iter().enumerate().step_by(every).map(|(index, [first, _])| (index, *first))
}

/// How many indices share a cell.
fn binned(grid: &Grid) -> String {
    let widest = |axis: &Axis| axis.bins.iter().map(|[first, last]| last - first + 1).max().unwrap_or(1);
    let part = |axis: &Axis| {
        let width = widest(axis);
        (width > 1).then(|| format!("{width} {}s", axis.name))
    };
    let parts: Vec<String> = [part(&grid.down), part(&grid.across)].into_iter().flatten().collect();
    if parts.is_empty() { String::new() } else { format!("(a cell is {})", parts.join(" by ")) }
}

/// What a map shows, in words.
fn said(grid: &Grid) -> String {
    let sums: Vec<([usize; 2], Cell)> = grid.rows().map(|(range, cells)| (range, sum(cells))).collect();
    let total = sum(&sums.iter().map(|(_, sum)| *sum).collect::<Vec<_>>());
    let drifting: Vec<String> = sums.iter().filter(|(_, sum)| sum.drift > 0).map(|(range, _)| ends(*range)).collect();
    match drifting.as_slice() {
        [] => counts(&total),
        rows if rows.len() == sums.len() && rows.len() > 1 => {
            format!("{}; every {} drifts", counts(&total), grid.down.name)
        }
        rows => {
            let more = if rows.len() > 8 { format!(" and {} more", rows.len() - 8) } else { String::new() };
            let shown = rows.iter().take(8).cloned().collect::<Vec<_>>().join(", ");
            format!("{}; drift in {} {shown}{more}", counts(&total), grid.down.name)
        }
    }
}

/// Whether anything drifts in a map.
pub fn drifts(grid: &Grid) -> bool {
    grid.rows().any(|(_, cells)| cells.iter().any(|cell| cell.drift > 0))
}

/// `12` or `8–15`.
fn ends([first, last]: [usize; 2]) -> String {
    if first == last { first.to_string() } else { format!("{first}–{last}") }
}

/// The elements of several cells.
pub fn sum(cells: &[Cell]) -> Cell {
    cells.iter().fold(Cell::default(), |sum, cell| Cell {
        exact: sum.exact + cell.exact,
        flips: sum.flips + cell.flips,
        ties: sum.ties + cell.ties,
        drift: sum.drift + cell.drift,
    })
}

/// How many elements a cell holds, and which.
pub fn counts(cell: &Cell) -> String {
    let parts = kinds([(cell.drift, "drift"), (cell.ties, "tie"), (cell.flips, "flip"), (cell.exact, "exact")]);
    match parts.as_slice() {
        [] => "nothing compared".to_owned(),
        [one] => one.clone(),
        several => format!("{}: {}", plural(cell.elements(), "element"), several.join(", ")),
    }
}

/// Those counts that are not zero, each with its kind: `1 flip`, `2 ties`, `3 drift`.
pub fn kinds<const N: usize>(counts: [(u64, &str); N]) -> Vec<String> {
    let present = counts.into_iter().filter(|(count, _)| *count > 0);
    let named = |(count, kind): (u64, &str)| match kind {
        "tie" | "flip" => plural(count, kind),
        kind => format!("{} {kind}", grouped(count)),
    };
    present.map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(cells: &[Cell]) -> String {
        row(cells, [0, 0], [6, 12]).markup().into_string()
    }

    #[test]
    fn equal_neighbours_are_one_rectangle() {
        let exact = Cell { exact: 40, ..Cell::default() };
        assert_eq!(drawn(&[exact; 100]), r#"<path class="x" d="M0 0h600v12h-600z"></path>"#);
        assert_eq!(drawn(&[Cell::default(); 100]), "");
        let drift = Cell { exact: 100_000, drift: 1, ..Cell::default() };
        let drawn = drawn(&[exact, drift, exact]);
        assert!(drawn.contains(r#"class="d" d="M6 0h6v12h-6z""#), "one of many fills the cell: {drawn}");
        assert!(drawn.contains(r#"class="x" d="M0 0h18v12h-18z""#), "one ground below all: {drawn}");
    }

    #[test]
    fn bars_grow_with_the_share_of_flips() {
        let cell = |flips, exact| Shape::of(&Cell { flips, exact, ..Cell::default() });
        assert_eq!(
            [cell(1, 99), cell(20, 80), cell(80, 20), cell(0, 1), cell(0, 0)],
            [Some(Shape::Flip(0)), Some(Shape::Flip(1)), Some(Shape::Flip(2)), Some(Shape::Exact), None]
        );
    }
}
