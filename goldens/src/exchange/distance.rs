//! How far two tensors of one type and shape are apart: how many elements have the same bits, and the Euclidean
//! distance.

use rayon::prelude::*;
use safetensors::Dtype;
use serde::Serialize;

/// Elements that one task compares; fixed, so that sums do not depend on the number of threads.
const CHUNK: usize = 1 << 16;

/// How two tensors compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Distance {
    /// Elements with the same bits.
    pub equal: u64,
    /// Elements.
    pub elements: u64,
    /// Squared Euclidean distance; elements of the same bits have none, and what is no finite number counts as zero.
    #[serde(skip)]
    pub squared: f64,
    /// Squared length of the second one.
    #[serde(skip)]
    pub length: f64,
}

impl Distance {
    /// Compares the bytes of two tensors of one type; the shorter one ends the comparison.
    #[must_use]
    pub fn between(dtype: Dtype, a: &[u8], b: &[u8]) -> Self {
        let size = (dtype.bitsize() / 8).max(1);
        let chunks: Vec<Self> = a
            .par_chunks(CHUNK * size)
            .zip(b.par_chunks(CHUNK * size))
            .map(|(a, b)| {
                a.chunks_exact(size)
                    .zip(b.chunks_exact(size))
                    .fold(Self::default(), |all, (a, b)| all.with(dtype, a, b))
            })
            .collect();
        chunks.into_iter().fold(Self::default(), |all, part| Self {
            equal: all.equal + part.equal,
            elements: all.elements + part.elements,
            squared: all.squared + part.squared,
            length: all.length + part.length,
        })
    }

    fn with(self, dtype: Dtype, a: &[u8], b: &[u8]) -> Self {
        let (same, of_b) = (a == b, finite(dtype, b));
        let apart = if same { 0.0 } else { finite(dtype, a) - of_b };
        Self {
            equal: self.equal + u64::from(same),
            elements: self.elements + 1,
            squared: self.squared + apart * apart,
            length: self.length + of_b * of_b,
        }
    }

    /// Whether every element has the same bits.
    #[must_use]
    pub fn is_equal(&self) -> bool {
        self.equal == self.elements
    }

    /// The distance as a share of the second one's length; infinite where that is zero and the first one is not.
    #[must_use]
    pub fn relative(&self) -> f64 {
        if self.squared == 0.0 { 0.0 } else { (self.squared / self.length).sqrt() }
    }
}

/// The value of an element, zero where it is no finite number or of a type that the contract does not have.
fn finite(dtype: Dtype, bytes: &[u8]) -> f64 {
    let value = match (dtype, bytes) {
        (Dtype::BF16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f64(),
        (Dtype::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f64(),
        (Dtype::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (Dtype::I32, &[a, b, c, d]) => f64::from(i32::from_le_bytes([a, b, c, d])),
        (Dtype::I8, &[a]) => f64::from(a.cast_signed()),
        (Dtype::I64, bytes) => bytes.try_into().map_or(0.0, |bytes| i64::from_le_bytes(bytes) as f64),
        _ => 0.0,
    };
    if value.is_finite() { value } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn bits_are_counted_and_distances_are_euclidean() {
        let (a, b) = (floats(&[1.0, -0.0, f32::NAN, 5.0]), floats(&[1.0, 0.0, f32::NAN, 2.0]));
        let distance = Distance::between(Dtype::F32, &a, &b);
        assert_eq!((distance.equal, distance.elements), (2, 4));
        assert_eq!((distance.squared, distance.length), (9.0, 5.0));
        let nan = Distance::between(Dtype::F32, &floats(&[f32::NAN]), &floats(&[3.0]));
        assert_eq!((nan.squared, nan.relative()), (9.0, 1.0));
        let codes = Distance::between(Dtype::I8, &[255, 3], &[1, 3]);
        assert_eq!((codes.squared, codes.equal), (4.0, 1));
    }

    #[test]
    fn sums_go_over_all_chunks() {
        let a = vec![0; 2 * 3 * CHUNK + 2];
        let b: Vec<u8> = [0x80, 0x3f].repeat(3 * CHUNK + 1);
        let distance = Distance::between(Dtype::BF16, &a, &b);
        assert_eq!((distance.elements, distance.squared), (3 * CHUNK as u64 + 1, 3.0 * CHUNK as f64 + 1.0));
    }
}
