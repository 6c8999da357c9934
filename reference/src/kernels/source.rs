//! Rows of weights that lie output by output, before they are widened: BF16 ones, and INT8 codes with a scale, of which
//! `BF16_RNE(f32(code) * scale)` is made. What a scale is tells which ways of rounding are right.

use half::bf16;

/// A row of weights before it is widened.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// BF16.
    Bf16(&'a [bf16]),
    /// INT8 codes, their scale, and whether a product of it may lie in the middle between two BF16 values.
    Scaled(&'a [i8], f32, bool),
}

impl<'a> Source<'a> {
    /// INT8 codes and their scale.
    #[inline]
    pub(super) fn scaled(row: &'a [i8], scale: f32) -> Self {
        Self::Scaled(row, scale, has_ties(scale))
    }

    /// The BF16 values; none of a row of codes.
    #[inline]
    pub(super) fn bf16(&self) -> &'a [bf16] {
        if let Self::Bf16(row) = self { row } else { &[] }
    }

    /// The INT8 codes; none of a row of BF16 values.
    #[inline]
    pub(super) fn codes(&self) -> &'a [i8] {
        if let Self::Scaled(row, ..) = self { row } else { &[] }
    }

    /// What codes are multiplied by.
    #[inline]
    pub(super) fn scale(&self) -> f32 {
        if let Self::Scaled(_, scale, _) = self { *scale } else { 1.0 }
    }

    /// Whether a product of the scale may lie in the middle between two BF16 values.
    #[inline]
    pub(super) fn ties(&self) -> bool {
        matches!(self, Self::Scaled(.., true))
    }

    /// Where term `at` lies, and the bytes of a term.
    #[inline]
    pub(super) fn address(&self, at: usize) -> (*const u8, usize) {
        match self {
            Self::Bf16(row) => (row.as_ptr().wrapping_add(at).cast(), size_of::<bf16>()),
            Self::Scaled(row, ..) => (row.as_ptr().wrapping_add(at).cast(), size_of::<i8>()),
        }
    }
}

/// Whether the product of a scale and some code lies in the middle between two BF16 values. Those of a code and of its
/// double do both or neither.
#[inline]
fn has_ties(scale: f32) -> bool {
    let product = |code: u16| f32::from(code) * scale;
    (0..64).fold(false, |ties, half| ties | (product(2 * half + 1).to_bits() & 0xffff == 0x8000))
}

/// Whether Veltkamp's splitting rounds the products of these scales and any code: where neither overflow nor subnormal
/// numbers come in its way.
pub(super) fn splits(scale: &[f32]) -> bool {
    scale.iter().all(|&scale| scale == 0.0 || (1e-30..1e30).contains(&scale.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_scale_without_ties_rounds_by_adding_half(bits: u32, few_bits: bool) {
            // With few significant bits ties are common, with all of them rare.
            let scale = f32::from_bits(if few_bits { bits & 0xFFFF_0000 } else { bits });
            prop_assume!(splits(&[scale]));
            let product = |code: i8| f32::from(code) * scale;
            let tie = |code: i8| product(code).to_bits() & 0xFFFF == 0x8000;
            prop_assert_eq!(has_ties(scale), (i8::MIN..=i8::MAX).any(tie));
            if !has_ties(scale) {
                for code in i8::MIN..=i8::MAX {
                    let rounded = (product(code).to_bits() + 0x8000) >> 16;
                    prop_assert_eq!(rounded, u32::from(bf16::from_f32(product(code)).to_bits()));
                }
            }
        }
    }
}
