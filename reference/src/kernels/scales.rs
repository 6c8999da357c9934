//! What a scale tells about the BF16 weights made with it, `BF16_RNE(f32(code) * scale)`: which ways of rounding are right.

/// Whether the product of a scale and some code lies in the middle between two BF16 values. Those of a code and of its
/// double do both or neither.
#[inline]
pub(super) fn has_ties(scale: f32) -> bool {
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
    use half::bf16;
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
