//! What a tensor holds, in a few numbers: its hash, its smallest and largest element, and how many are no finite numbers.

use rayon::prelude::*;
use safetensors::Dtype;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::elements::{Element, Scalar, Work, with_type};

/// Bytes that one task looks at; a multiple of every element's size, and fixed so that nothing depends on the threads.
const CHUNK: usize = 1 << 20;

/// A tensor in a few numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Statistics {
    /// SHA-256 of the elements in logical row-major order, little-endian.
    pub sha256: String,
    /// The smallest element that is a number: NaN is left out, infinities are not. None where there is no element, and for
    /// complex numbers, which have no order; NaN where there is nothing else.
    pub min: Option<Scalar>,
    /// The largest, likewise.
    pub max: Option<Scalar>,
    /// Elements that are NaN or infinite; complex ones of which a part is.
    pub nonfinite: u64,
}

/// Looks at the elements of a tensor, in logical row-major order.
#[must_use]
pub fn statistics(dtype: Dtype, bytes: &[u8]) -> Statistics {
    let (sha256, (min, max, nonfinite)) = rayon::join(|| hash(bytes), || with_type(dtype, Extremes { dtype, bytes }));
    Statistics { sha256, min, max, nonfinite }
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Extremes<'a> {
    dtype: Dtype,
    bytes: &'a [u8],
}

impl Work for Extremes<'_> {
    type Output = (Option<Scalar>, Option<Scalar>, u64);

    fn run<T: Element>(self) -> Self::Output {
        let parts = if self.dtype == Dtype::C64 { 2 } else { 1 };
        let chunks: Vec<Chunk<T>> = self.bytes.par_chunks(CHUNK).map(|bytes| Chunk::of(bytes, parts)).collect();
        let nonfinite = chunks.iter().map(|chunk| chunk.nonfinite).sum();
        if self.bytes.is_empty() || parts == 2 {
            return (None, None, nonfinite);
        }
        let min = chunks.iter().filter_map(|chunk| chunk.min).min_by_key(|&(place, _)| place);
        let max = chunks.iter().filter_map(|chunk| chunk.max).max_by_key(|&(place, _)| place);
        let value = |found: Option<(i64, T)>| match found.map(|(_, element)| element.value()) {
            // Both zeros have one place: which of them came first says nothing.
            Some(Scalar::Float(value)) => Some(Scalar::Float(value + 0.0)),
            Some(Scalar::Single(value)) => Some(Scalar::Single(value + 0.0)),
            None => Some(Scalar::Float(f64::NAN)),
            integer => integer,
        };
        (value(min), value(max), nonfinite)
    }
}

struct Chunk<T> {
    min: Option<(i64, T)>,
    max: Option<(i64, T)>,
    nonfinite: u64,
}

impl<T: Element> Chunk<T> {
    fn of(bytes: &[u8], parts: usize) -> Self {
        let mut chunk = Self { min: None, max: None, nonfinite: 0 };
        for element in bytes.chunks_exact(T::SIZE * parts) {
            let mut nonfinite = false;
            for part in element.chunks_exact(T::SIZE) {
                let part = T::read(part);
                nonfinite |= part.is_nonfinite();
                if let Some(place) = part.place() {
                    if chunk.min.is_none_or(|(least, _)| place < least) {
                        chunk.min = Some((place, part));
                    }
                    if chunk.max.is_none_or(|(most, _)| place > most) {
                        chunk.max = Some((place, part));
                    }
                }
            }
            chunk.nonfinite += u64::from(nonfinite);
        }
        chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_f32(values: &[f32]) -> Statistics {
        statistics(Dtype::F32, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    #[test]
    fn nan_is_left_out_and_infinities_are_not() {
        let found = of_f32(&[1.0, f32::NAN, -0.0, f32::INFINITY, -3.5]);
        assert_eq!((found.min, found.max), (Some(Scalar::Single(-3.5)), Some(Scalar::Single(f32::INFINITY))));
        assert_eq!(found.nonfinite, 2);
        let Some(Scalar::Single(zero)) = of_f32(&[-0.0]).min else { panic!() };
        assert!(zero.is_sign_positive());
        assert!(matches!(of_f32(&[f32::NAN]).max, Some(Scalar::Float(value)) if value.is_nan()));
        assert_eq!(of_f32(&[]).min, None);
        assert_eq!(of_f32(&[]).sha256, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    }

    #[test]
    fn extremes_behind_chunks_are_found() {
        let mut bytes = vec![7u8; 2 * CHUNK + 3];
        bytes[2 * CHUNK + 2] = 200;
        bytes[CHUNK + 1] = 1;
        let found = statistics(Dtype::U8, &bytes);
        assert_eq!((found.min, found.max), (Some(Scalar::Int(1)), Some(Scalar::Int(200))));
        let complex: Vec<u8> = [1.0, f32::NAN, 2.0, 3.0].iter().flat_map(|value| value.to_le_bytes()).collect();
        let found = statistics(Dtype::C64, &complex);
        assert_eq!((found.min, found.nonfinite), (None, 1));
    }
}
