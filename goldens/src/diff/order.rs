//! Whether two tensors hold the same values in another order of memory: what a writer makes that saves an array's memory
//! under the shape that the array has logically.

/// Whether `bytes`, read as a column-major tensor of a shape, are `other` read as a row-major one.
pub(super) fn is_column_major_of(bytes: &[u8], other: &[u8], shape: &[usize], size: usize) -> bool {
    let long = shape.iter().filter(|&&length| length > 1).count();
    if long < 2 || bytes.len() != other.len() || size == 0 {
        return false;
    }
    match size {
        1 => walk::<1>(bytes, other, shape),
        2 => walk::<2>(bytes, other, shape),
        4 => walk::<4>(bytes, other, shape),
        8 => walk::<8>(bytes, other, shape),
        _ => false,
    }
}

/// Goes through `other` in its order and through `bytes` in steps of columns, up to the first difference.
fn walk<const N: usize>(bytes: &[u8], other: &[u8], shape: &[usize]) -> bool {
    let ((bytes, []), (other, [])) = (bytes.as_chunks::<N>(), other.as_chunks::<N>()) else { return false };
    let mut strides = Vec::with_capacity(shape.len());
    let mut step = 1usize;
    for &length in shape {
        strides.push(step);
        step = step.saturating_mul(length);
    }
    let mut index = vec![0usize; shape.len()];
    let mut at = 0usize;
    for element in other {
        if bytes.get(at) != Some(element) {
            return false;
        }
        for dimension in (0..shape.len()).rev() {
            index[dimension] += 1;
            at += strides[dimension];
            if index[dimension] < shape[dimension] {
                break;
            }
            at -= index[dimension] * strides[dimension];
            index[dimension] = 0;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_told_from_rows() {
        let rows: Vec<u8> = (0..12).collect();
        let columns: Vec<u8> = (0..12).map(|at| rows[(at % 3) * 4 + at / 3]).collect();
        assert!(is_column_major_of(&columns, &rows, &[3, 4], 1));
        assert!(!is_column_major_of(&rows, &columns, &[3, 4], 1));
        assert!(is_column_major_of(&rows, &columns, &[4, 3], 1));
        // A vector has one order only, which is no finding.
        assert!(!is_column_major_of(&rows, &rows, &[1, 12], 1));
        let wide: Vec<u8> = columns.iter().flat_map(|&byte| [byte, 9]).collect();
        let wide_rows: Vec<u8> = rows.iter().flat_map(|&byte| [byte, 9]).collect();
        assert!(is_column_major_of(&wide, &wide_rows, &[3, 4], 2));
    }
}
