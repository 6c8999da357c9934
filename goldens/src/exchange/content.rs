//! What the content of an entry says of what it is, and of how it differs from what it should be.

use device::dump::Array;

use super::distance::Distance;
use super::targets::Target;

/// What the content of an entry says.
pub(super) enum Said<'t> {
    /// It is this tensor and no other.
    Is(&'t Target),
    /// It is one of these, which hold the same.
    OneOf(Vec<&'t Target>),
    /// Nothing.
    Nothing,
}

/// What the content of an entry says, given its candidates, nearest first.
pub(super) fn said<'t>(candidates: &[(&'t Target, Distance)]) -> Said<'t> {
    let Some(&(best, distance)) = candidates.first() else { return Said::Nothing };
    // One number may be anything, and so may nothing but zeros.
    if distance.elements < 2 || distance.length == 0.0 || 4.0 * distance.squared >= distance.length {
        return Said::Nothing;
    }
    let mut same = vec![best];
    for &(other, _) in &candidates[1..] {
        let apart = Distance::between(best.dtype, &best.bytes, &other.bytes);
        if apart.is_equal() {
            same.push(other);
        } else if 4.0 * distance.squared >= apart.squared && !distance.is_equal() {
            return Said::Nothing;
        }
    }
    if same.len() == 1 { Said::Is(best) } else { Said::OneOf(same) }
}

/// Names in a row.
pub(super) fn joined(targets: &[&Target], by: &str) -> String {
    targets.iter().map(|target| target.name.as_str()).collect::<Vec<_>>().join(by)
}

/// Where an entry first differs from a tensor, with both values.
pub(super) fn first_difference(array: &Array, target: &Target) -> String {
    let size = (target.dtype.bitsize() / 8).max(1);
    let pairs = array.bytes.chunks_exact(size).zip(target.bytes.chunks_exact(size));
    let Some((index, (a, b))) = pairs.enumerate().find(|(_, (a, b))| a != b) else { return "nowhere".to_owned() };
    let columns = target.shape.last().copied().unwrap_or(1).max(1);
    let hex = |bytes: &[u8]| bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("[{}, {}], 0x{} for 0x{}", index / columns, index % columns, hex(a), hex(b))
}
