//! Embedding and head: BF16 where it lies in its file, or copied and rounded where it cannot be used there.

use std::sync::OnceLock;

use half::bf16;
use ndarray::{Array2, ArrayView2};
use rayon::prelude::*;
use reference::Rounding;
use reference::rounding::to_bf16;
use safetensors::Dtype;

use super::shards::{Place, Shards};

/// Embedding or head. BF16 is used where it lies; FP32, or BF16 at an odd address, is copied when first used.
#[derive(Debug)]
pub struct Matrix {
    /// Where the file holds it.
    pub place: Place,
    copy: OnceLock<Array2<bf16>>,
}

impl Matrix {
    /// The matrix at a place that was checked.
    pub fn at(place: Place) -> Self {
        Self { place, copy: OnceLock::new() }
    }

    fn shape(&self) -> (usize, usize) {
        match self.place.shape[..] {
            [rows, columns] => (rows, columns),
            _ => (0, 0),
        }
    }

    /// The matrix where it lies; `None` where it has to be copied.
    pub fn in_place<'a>(&self, shards: &'a Shards) -> Option<ArrayView2<'a, bf16>> {
        let bytes = if self.place.dtype == Dtype::BF16 { shards.bytes(&self.place) } else { return None };
        ArrayView2::from_shape(self.shape(), bytemuck::try_cast_slice(bytes).ok()?).ok()
    }

    /// The matrix, BF16 `[rows, columns]`; copied at the first call where it has to be.
    pub fn view<'a>(&'a self, shards: &'a Shards) -> ArrayView2<'a, bf16> {
        self.in_place(shards).unwrap_or_else(|| self.copy.get_or_init(|| self.narrowed(shards)).view())
    }

    fn narrowed(&self, shards: &Shards) -> Array2<bf16> {
        const CHUNK: usize = 1 << 16;
        let bytes = shards.bytes(&self.place);
        let mut values = vec![bf16::ZERO; self.place.shape.iter().product()];
        let size = bytes.len() / values.len().max(1);
        values.par_chunks_mut(CHUNK).zip(bytes.par_chunks(CHUNK * size)).for_each(|(values, bytes)| match size {
            4 => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = to_bf16(f32::from_le_bytes(*bytes), Rounding::Rne);
                }
            }
            _ => {
                for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = bf16::from_le_bytes(*bytes);
                }
            }
        });
        Array2::from_shape_vec(self.shape(), values).unwrap_or_default()
    }
}
