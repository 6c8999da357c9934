//! Where the marks of one compared tensor lie, binned so that a report can draw them. A cell counts each mark apart: a
//! single drifting element stays one however many exact ones share its cell, and an element that was not compared is in
//! none. Computed only when asked for ([`crate::Job::maps`]), and no part of the JSON report.

use reference::inputs::cache_place;
use reference::{BATCH, LayerInputs, PAGE, TensorId};

use crate::Mark;
use crate::checks::expected_rows;
use crate::evidence::CacheEvidence;
use crate::place::place;
use crate::tally::{Comparison, ulps};

/// Cells of a map from left to right, at most.
pub const MOST_ACROSS: usize = 128;
/// Cells of a map from top to bottom, at most.
pub const MOST_DOWN: usize = 64;

/// Compared elements that share a cell, by mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// The bits that the contract gives.
    pub exact: u64,
    /// Explained by a permitted freedom.
    pub flips: u64,
    /// Exact ties that went by another rule than asked for.
    pub ties: u64,
    /// Explained by nothing.
    pub drift: u64,
}

impl Cell {
    /// Counts one element; a skipped one is none.
    pub fn add(&mut self, mark: Mark) {
        match mark {
            Mark::Exact => self.exact += 1,
            Mark::Flip => self.flips += 1,
            Mark::Tie => self.ties += 1,
            Mark::Drift => self.drift += 1,
            Mark::Skipped => {}
        }
    }

    /// Elements compared.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.exact + self.flips + self.ties + self.drift
    }

    /// The worst mark that it holds: one element of it is enough. `None` where nothing was compared.
    #[must_use]
    pub fn worst(&self) -> Option<Mark> {
        let marks = [(self.drift, Mark::Drift), (self.ties, Mark::Tie), (self.flips, Mark::Flip)];
        let found = marks.into_iter().find(|(count, _)| *count > 0).map(|(_, mark)| mark);
        found.or((self.exact > 0).then_some(Mark::Exact))
    }
}

/// One side of a map: what its indices are, and those that share a bin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// What an index is, in the singular: `row`, `column`, `head`, `page`, `slot of the page`.
    pub name: &'static str,
    /// First and last index of each bin, ascending.
    pub bins: Vec<[usize; 2]>,
}

impl Axis {
    /// Indices from 0 to `length`, as many to a bin as it takes to have `most` bins or fewer.
    #[must_use]
    pub fn whole(name: &'static str, length: usize, most: usize) -> Self {
        let width = length.div_ceil(most.max(1)).max(1);
        let bins = (0..length).step_by(width).map(|first| [first, (first + width).min(length) - 1]);
        Self { name, bins: bins.collect() }
    }

    /// These indices alone, ascending and each once, as many to a bin as it takes to have `most` bins or fewer.
    #[must_use]
    pub fn listed(name: &'static str, indices: &[usize], most: usize) -> Self {
        let width = indices.len().div_ceil(most.max(1)).max(1);
        let ends = |bin: &[usize]| Some([*bin.first()?, *bin.last()?]);
        Self { name, bins: indices.chunks(width).filter_map(ends).collect() }
    }

    /// The bin of an index; `None` where it lies in none.
    fn bin(&self, index: usize) -> Option<usize> {
        let bin = self.bins.partition_point(|[_, last]| *last < index);
        self.bins.get(bin).filter(|[first, _]| *first <= index).map(|_| bin)
    }
}

/// Marks over two axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    /// From top to bottom.
    pub down: Axis,
    /// From left to right.
    pub across: Axis,
    /// Row-major.
    cells: Vec<Cell>,
}

impl Grid {
    /// A map of nothing yet.
    #[must_use]
    pub fn new(down: Axis, across: Axis) -> Self {
        let cells = vec![Cell::default(); down.bins.len() * across.bins.len()];
        Self { down, across, cells }
    }

    /// Counts one element; one outside the axes is not in the map.
    pub fn add(&mut self, down: usize, across: usize, mark: Mark) {
        let (Some(down), Some(across)) = (self.down.bin(down), self.across.bin(across)) else { return };
        if let Some(cell) = self.cells.get_mut(down * self.across.bins.len() + across) {
            cell.add(mark);
        }
    }

    /// Its rows from top to bottom: the first and last index of each, and its cells.
    pub fn rows(&self) -> impl Iterator<Item = ([usize; 2], &[Cell])> {
        let width = self.across.bins.len().max(1);
        self.down.bins.iter().copied().zip(self.cells.chunks(width))
    }
}

/// How far values lie apart, in units in the last place: bin 0 holds a distance of 0, bin `n` those above `2^(n-2)` up
/// to `2^(n-1)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distances {
    /// Elements by distance, up to the last bin that holds any.
    pub bins: Vec<Cell>,
    /// Elements without a distance: one side is not finite.
    pub none: Cell,
}

impl Distances {
    /// Counts one element.
    pub fn add(&mut self, mark: Mark, distance: Option<u64>) {
        let Some(distance) = distance else { return self.none.add(mark) };
        if mark == Mark::Skipped {
            return;
        }
        let bin = match distance {
            0 => 0,
            1 => 1,
            more => (more - 1).ilog2() as usize + 2,
        };
        if self.bins.len() <= bin {
            self.bins.resize(bin + 1, Cell::default());
        }
        if let Some(cell) = self.bins.get_mut(bin) {
            cell.add(mark);
        }
    }

    /// The least and the largest distance of a bin.
    #[must_use]
    pub fn range(bin: usize) -> [u64; 2] {
        let power = |exponent: usize| 1u64.checked_shl(exponent as u32).unwrap_or(u64::MAX);
        match bin {
            0 => [0, 0],
            1 => [1, 1],
            bin => [power(bin - 2).saturating_add(1), power(bin - 1)],
        }
    }
}

/// The maps of one tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorMap {
    /// Marks by place. Of a layer's tensor: row by column as captured (of cache tensors, batch row by column); batch
    /// row by head, where it is laid out by head; page by slot of the page for cache tensors, where what was written to
    /// slots that the batch does not name is drift. Of a token run's: by layer, position, row and column, as they apply.
    pub grids: Vec<Grid>,
    /// Distances in units in the last place of the tensor's type.
    pub distances: Distances,
}

/// The maps of a compared tensor of a layer. `cache` tells where else the device wrote.
pub(crate) fn of(comparison: &Comparison, inputs: &LayerInputs<'_>, cache: Option<&CacheEvidence>) -> TensorMap {
    let (id, geometry) = (comparison.id, inputs.geometry);
    let cached = matches!(id, TensorId::KRows | TensorId::VRows);
    let (rows, columns) = comparison.marks.dim();
    let down = Axis::whole(if cached { "batch row" } else { "row" }, rows, MOST_DOWN);
    let mut elements = Grid::new(down, Axis::whole("column", columns, MOST_ACROSS));
    let heads = match id {
        TensorId::AllQPadded => geometry.num_attention_heads,
        _ if place(id, geometry, 0, 0).head.is_some() => columns / geometry.head_dim,
        _ => 0,
    };
    let by_head = || Grid::new(Axis::whole("batch row", BATCH, MOST_DOWN), Axis::whole("head", heads, MOST_ACROSS));
    let mut heads = (heads > 0).then(by_head);
    let mut pages = cached.then(|| pages(inputs, cache));
    let mut distances = Distances::default();
    for ((row, column), &mark) in comparison.marks.indexed_iter() {
        if mark == Mark::Skipped {
            continue;
        }
        elements.add(row, column, mark);
        let at = place(id, geometry, row, column);
        if let (Some(grid), Some(head)) = (&mut heads, at.head) {
            grid.add(at.row, head, mark);
        }
        if let (Some(grid), Some(slot)) = (&mut pages, inputs.batch.slots.get(at.row)) {
            grid.add(slot / PAGE, slot % PAGE, mark);
        }
        let (device, reference) = (&comparison.device, &comparison.reference);
        let bits = [device.bits(row, column), reference.bits(row, column)];
        let finite = device.get(row, column).is_finite() && reference.get(row, column).is_finite();
        // The same bits are no distance apart, whatever they stand for.
        distances.add(mark, (finite || bits[0] == bits[1]).then(|| ulps(id.dtype(), bits[0], bits[1])));
    }
    TensorMap { grids: [Some(elements), heads, pages].into_iter().flatten().collect(), distances }
}

/// The pages that this step writes or should, with what was written beside the batch's slots.
fn pages(inputs: &LayerInputs<'_>, cache: Option<&CacheEvidence>) -> Grid {
    let expected = expected_rows(inputs);
    let written = cache.iter().flat_map(|cache| cache.position.keys());
    let strays: Vec<usize> = written.copied().filter(|row| !expected.contains(row)).collect();
    let slots = inputs.batch.slots.iter().copied();
    let slots = slots.chain(strays.iter().map(|&row| cache_place(inputs.geometry, row).0));
    let mut listed: Vec<usize> = slots.map(|slot| slot / PAGE).collect();
    listed.sort_unstable();
    listed.dedup();
    let down = Axis::listed("page", &listed, MOST_DOWN);
    let mut grid = Grid::new(down, Axis::whole("slot of the page", PAGE, MOST_ACROSS));
    for row in strays {
        let slot = cache_place(inputs.geometry, row).0;
        grid.add(slot / PAGE, slot % PAGE, Mark::Drift);
    }
    grid
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(grid: &Grid) -> Cell {
        grid.rows().flat_map(|(_, cells)| cells).fold(Cell::default(), |sum, cell| Cell {
            exact: sum.exact + cell.exact,
            flips: sum.flips + cell.flips,
            ties: sum.ties + cell.ties,
            drift: sum.drift + cell.drift,
        })
    }

    #[test]
    fn one_drifting_element_among_a_million_stays_visible() {
        let (rows, columns) = (1000, 1000);
        let mut grid = Grid::new(Axis::whole("row", rows, MOST_DOWN), Axis::whole("column", columns, MOST_ACROSS));
        for row in 0..rows {
            for column in 0..columns {
                grid.add(row, column, if (row, column) == (501, 998) { Mark::Drift } else { Mark::Exact });
            }
        }
        assert_eq!(total(&grid), Cell { exact: 999_999, drift: 1, ..Cell::default() });
        let marks = grid.rows().flat_map(|(_, cells)| cells).filter_map(Cell::worst);
        assert_eq!(marks.filter(|mark| *mark == Mark::Drift).count(), 1);
        let (rows, cells) = grid.rows().find(|(_, cells)| cells.iter().any(|cell| cell.drift > 0)).unwrap();
        assert!(rows[0] <= 501 && 501 <= rows[1], "{rows:?}");
        let column = cells.iter().position(|cell| cell.drift > 0).unwrap();
        let columns = grid.across.bins[column];
        assert!(columns[0] <= 998 && 998 <= columns[1], "{columns:?}");
    }

    #[test]
    fn the_worst_mark_is_what_a_cell_is() {
        let cell = Cell { exact: 9, flips: 5, ties: 0, drift: 0 };
        assert_eq!(cell.worst(), Some(Mark::Flip));
        assert_eq!(Cell { ties: 1, ..cell }.worst(), Some(Mark::Tie));
        assert_eq!(Cell { ties: 1, drift: 1, ..cell }.worst(), Some(Mark::Drift));
        assert_eq!(Cell { exact: 1, ..Cell::default() }.worst(), Some(Mark::Exact));
        assert_eq!(Cell::default().worst(), None);
    }

    #[test]
    fn what_was_not_compared_is_counted_nowhere() {
        let mut grid = Grid::new(Axis::whole("row", 2, 64), Axis::whole("column", 2, 64));
        let mut distances = Distances::default();
        grid.add(0, 0, Mark::Skipped);
        distances.add(Mark::Skipped, Some(3));
        distances.add(Mark::Skipped, None);
        assert_eq!((total(&grid), distances), (Cell::default(), Distances::default()));
        // Neither is what lies outside.
        grid.add(2, 0, Mark::Drift);
        grid.add(0, 2, Mark::Drift);
        assert_eq!(total(&grid), Cell::default());
    }

    #[test]
    fn bins_cover_every_index_once() {
        for (length, most) in [(0, 4), (1, 4), (4, 4), (5, 4), (17_408, 128), (1024, 64), (3, 0)] {
            let axis = Axis::whole("row", length, most);
            assert!(axis.bins.len() <= most.max(1), "{length} {most}");
            let mut next = 0;
            for &[first, last] in &axis.bins {
                assert_eq!(first, next);
                assert!(first <= last);
                next = last + 1;
            }
            assert_eq!(next, length);
            assert_eq!((axis.bin(length), axis.bin(0).is_some()), (None, length > 0));
        }
        let pages = Axis::listed("page", &[3, 9, 17, 40, 41], 3);
        assert_eq!(pages.bins, [[3, 9], [17, 40], [41, 41]]);
        assert_eq!(
            [2, 3, 9, 10, 17, 41, 42].map(|page| pages.bin(page)),
            [None, Some(0), Some(0), None, Some(1), Some(2), None]
        );
        assert_eq!(Axis::listed("page", &[], 3).bins, Vec::<[usize; 2]>::new());
    }

    #[test]
    fn distances_double_from_bin_to_bin() {
        let mut distances = Distances::default();
        for distance in 0..=17 {
            distances.add(Mark::Flip, Some(distance));
        }
        let counts: Vec<u64> = distances.bins.iter().map(|cell| cell.flips).collect();
        assert_eq!(counts, [1, 1, 1, 2, 4, 8, 1]);
        assert_eq!([0, 1, 2, 3, 4].map(Distances::range), [[0, 0], [1, 1], [2, 2], [3, 4], [5, 8]]);
        distances.add(Mark::Drift, Some(u64::MAX));
        assert_eq!(distances.bins.len(), 66);
        assert_eq!(Distances::range(65), [(1 << 63) + 1, u64::MAX]);
        distances.add(Mark::Drift, None);
        assert_eq!(distances.none, Cell { drift: 1, ..Cell::default() });
    }
}
