//! The distance between what a device gave and what a kernel with faults would have given, in bits: the sum over
//! elements of `log2(1 + ULPs)`. A flip costs one bit, a value of another size a few more, so that neither a single
//! outlier nor a sea of flips decides alone.

use half::bf16;
use ndarray::ArrayView1;
use reference::{DType, Tensor};

use crate::compare::same_bytes;
use crate::report::Reproduced;
use crate::tally::ulps;

/// A distance, and how many elements agree.
#[derive(Clone, Copy, Debug, Default)]
pub struct Loss {
    /// Bits.
    pub bits: f64,
    /// Elements that agree, of those compared.
    pub reproduced: Reproduced,
}

impl Loss {
    /// Adds another tensor's.
    pub fn add(&mut self, other: Self) {
        self.bits += other.bits;
        self.reproduced.exact += other.reproduced.exact;
        self.reproduced.elements += other.reproduced.elements;
    }
}

/// The distance of one element.
pub fn distance(dtype: DType, a: (f32, u32), b: (f32, u32)) -> f64 {
    if a.1 == b.1 || (a.0.is_nan() && b.0.is_nan()) {
        0.0
    } else if a.0.is_finite() && b.0.is_finite() {
        (1.0 + ulps(dtype, a.1, b.1) as f64).log2()
    } else {
        8.0 * dtype.size() as f64
    }
}

/// The distance of a tensor.
pub fn of_tensor(device: &Tensor, predicted: &Tensor) -> Loss {
    let [rows, columns] = device.shape();
    let mut loss = Loss { bits: 0.0, reproduced: Reproduced { exact: 0, elements: (rows * columns) as u64 } };
    if device.shape() != predicted.shape() {
        return loss;
    }
    for row in 0..rows {
        if same_bytes(device, predicted, row) {
            loss.reproduced.exact += columns as u64;
            continue;
        }
        for column in 0..columns {
            let of = |tensor: &Tensor| (tensor.get(row, column), tensor.bits(row, column));
            let bits = distance(device.dtype(), of(device), of(predicted));
            loss.bits += bits;
            loss.reproduced.exact += u64::from(bits == 0.0);
        }
    }
    loss
}

/// The distance of a cache row.
pub fn of_row(device: ArrayView1<'_, bf16>, predicted: ArrayView1<'_, bf16>) -> Loss {
    let mut loss = Loss::default();
    for (a, b) in device.iter().zip(predicted) {
        let of = |x: &bf16| (x.to_f32(), u32::from(x.to_bits()));
        let bits = distance(DType::Bf16, of(a), of(b));
        loss.bits += bits;
        loss.reproduced.exact += u64::from(bits == 0.0);
        loss.reproduced.elements += 1;
    }
    loss
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flip_is_one_bit_and_nan_is_its_own_equal() {
        let of = |x: f32| (x, x.to_bits() >> 16);
        assert_eq!(distance(DType::Bf16, of(1.0), of(1.0)), 0.0);
        assert_eq!(distance(DType::Bf16, of(1.0), of(1.007_812_5)), 1.0);
        assert_eq!(distance(DType::Bf16, of(f32::NAN), (f32::NAN, 0xFFC0)), 0.0);
        assert_eq!(distance(DType::Bf16, of(f32::NAN), of(1.0)), 16.0);
        assert!(distance(DType::Bf16, of(1.0), of(-1.0)) < 16.0);
    }
}
