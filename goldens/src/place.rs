//! Where an element of a captured tensor lies in the batch: its physical row, its head.

use reference::{BATCH, Geometry, TensorId};

/// The place of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Physical row of the batch.
    pub row: usize,
    /// Query head, or KV head for keys and values; `None` for tensors that are not laid out by head.
    pub head: Option<usize>,
}

/// The place of element `[row, column]`.
pub fn place(id: TensorId, geometry: &Geometry, row: usize, column: usize) -> Place {
    use TensorId as T;
    let by_head = |row| Place { row, head: Some(column / geometry.head_dim) };
    match id {
        T::AllQPadded => {
            let block = row / BATCH;
            let kv_head = block % geometry.num_key_value_heads;
            // Rows after the last query of a KV head belong to no head; they are zero.
            let query = Some(row % BATCH).filter(|&query| query < geometry.group());
            let head = query.map(|query| kv_head * geometry.group() + query);
            Place { row: block / geometry.num_key_value_heads, head }
        }
        T::QProj
        | T::KProj
        | T::VProj
        | T::QProjNorm
        | T::KProjNorm
        | T::VProjNorm
        | T::KRows
        | T::VRows
        | T::AttnOut
        | T::AttnOutI8 => by_head(row),
        _ => Place { row: row % BATCH, head: None },
    }
}

/// Joins indices as `0, 3-5, 9`.
pub fn ranges(indices: &[usize]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut i = 0;
    while i < indices.len() {
        let mut j = i;
        while j + 1 < indices.len() && indices[j + 1] == indices[j] + 1 {
            j += 1;
        }
        parts.push(if i == j { indices[i].to_string() } else { format!("{}-{}", indices[i], indices[j]) });
        i = j + 1;
    }
    parts.join(", ")
}

/// `row 3` or `rows 0, 3-5`.
pub fn counted(noun: &str, indices: &[usize]) -> String {
    let plural = if indices.len() == 1 { "" } else { "s" };
    format!("{noun}{plural} {}", ranges(indices))
}

/// `1 row is` or `5 rows are`.
pub fn number(count: usize, one: &str, more: &str) -> String {
    if count == 1 { format!("1 {one}") } else { format!("{count} {more}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padded_queries_know_their_row_and_head() {
        let mini = Geometry::named("mini").unwrap();
        // Row 3, KV head 2, query 4 of its group of 5.
        let at = (3 * 4 + 2) * 16 + 4;
        assert_eq!(place(TensorId::AllQPadded, &mini, at, 7), Place { row: 3, head: Some(14) });
        assert_eq!(place(TensorId::DownAccParts, &mini, 16 + 9, 7), Place { row: 9, head: None });
    }

    #[test]
    fn index_lists_are_short() {
        assert_eq!(ranges(&[0, 3, 4, 5, 9]), "0, 3-5, 9");
        assert_eq!(counted("row", &[2]), "row 2");
        assert_eq!(counted("row", &[2, 3]), "rows 2-3");
    }
}
