//! Activations as the loops of a level read them: a few rows at a time, and of those eight terms of each in turn, so that
//! what is read together lies together.

use super::aligned::Aligned;
use super::sum::LANES;

/// Activation rows in groups, each group by eight terms, row by row. The last terms are filled up with zeros.
pub(super) struct Packed {
    /// First row and rows of a group, and where its values begin.
    pub(super) groups: Vec<(usize, usize, usize)>,
    pub(super) values: Aligned<f32>,
}

impl Packed {
    /// Groups of up to `most` rows, eight at most.
    pub(super) fn new(x: &[f32], depth: usize, most: usize) -> Self {
        let (rows, steps) = (x.len() / depth, depth.div_ceil(LANES));
        let mut values = Aligned::zeros(rows * steps * LANES);
        let mut groups = Vec::new();
        let mut first = 0;
        while first < rows {
            let size = group_size((rows - first).min(most));
            let start = first * steps * LANES;
            let rows: Vec<&[f32]> = x[first * depth..].chunks_exact(depth).take(size).collect();
            let packed = values[start..].chunks_exact_mut(size * LANES);
            for (at, packed) in (0..depth).step_by(LANES).zip(packed) {
                for (row, packed) in rows.iter().zip(packed.as_chunks_mut::<LANES>().0) {
                    match row[at..].first_chunk() {
                        Some(terms) => *packed = *terms,
                        None => packed[..depth - at].copy_from_slice(&row[at..]),
                    }
                }
            }
            groups.push((first, size, start));
            first += size;
        }
        Self { groups, values }
    }
}

/// The size of the next group of at most `rows` activation rows.
fn group_size(rows: usize) -> usize {
    [8, 4, 2, 1].into_iter().find(|&size| size <= rows).unwrap_or(1)
}
