//! How a channel of BF16 weights becomes INT8 codes and a scale: the rule of this project, and those of two compressors
//! whose checkpoints are in use. They differ in what the largest weight is divided by, in the type that divisions are
//! rounded to, and in whether -128 is a code (`docs/checkpoints.md`, Rules).

use half::bf16;
use pulp::{Arch, NullaryFnOnce};
use reference::rounding::{Rounding, round_f32, widen};
use safetensors::Dtype;

/// A rule of symmetric quantization channel by channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rule {
    /// The largest magnitude over 127, in FP32; codes from -127 to 127.
    #[default]
    Float32,
    /// llmcompressor on a model loaded as BF16: the largest magnitude over 127.5; scales and quotients are rounded to
    /// BF16; codes from -128 to 127.
    LlmCompressor,
    /// llmcompressor on a model loaded as FP32: the same without rounding to BF16.
    LlmCompressorFloat32,
    /// msmodelslim: the largest magnitude over 127; scales and quotients are rounded to BF16, and scales stored as
    /// FP32; codes from -128 to 127.
    MsModelSlim,
}

/// What a rule computes, as numbers.
struct Arithmetic {
    /// What the largest magnitude is divided by.
    steps: f32,
    /// Whether scales and quotients are rounded to BF16.
    narrow: bool,
    /// Lowest code.
    lowest: f32,
    /// Smallest scale.
    floor: f32,
    /// The scale instead of one that is 0.
    instead_of_zero: f32,
}

/// Spacing of FP32 at 1, and of BF16.
const EPSILON: f32 = f32::EPSILON;
const EPSILON_BF16: f32 = 0.007_812_5;

/// A weight that no code can stand for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NotFinite {
    /// Its place in the channel.
    pub index: usize,
    /// The weight.
    pub value: f32,
}

impl Rule {
    /// Every rule, the default first.
    pub const ALL: [Self; 4] = [Self::Float32, Self::LlmCompressor, Self::LlmCompressorFloat32, Self::MsModelSlim];

    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::LlmCompressor => "llmcompressor",
            Self::LlmCompressorFloat32 => "llmcompressor-float32",
            Self::MsModelSlim => "msmodelslim",
        }
    }

    /// The rule of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.name() == name)
    }

    /// The type that the rule's scales are stored as.
    #[must_use]
    pub fn scale_type(self) -> Dtype {
        if self == Self::LlmCompressor { Dtype::BF16 } else { Dtype::F32 }
    }

    fn arithmetic(self) -> Arithmetic {
        let (steps, narrow, lowest) = match self {
            Self::Float32 => (127.0, false, -127.0),
            Self::LlmCompressor => (127.5, true, -128.0),
            Self::LlmCompressorFloat32 => (127.5, false, -128.0),
            Self::MsModelSlim => (127.0, true, -128.0),
        };
        let floor = if self == Self::MsModelSlim { EPSILON } else { 0.0 };
        let instead_of_zero = if self == Self::LlmCompressor { EPSILON_BF16 } else { EPSILON };
        Arithmetic { steps, narrow, lowest, floor, instead_of_zero }
    }

    /// Quantizes one output channel: writes a code for each weight and returns the scale.
    ///
    /// # Errors
    /// The first weight that is NaN or infinite.
    pub fn quantize(self, weights: &[bf16], codes: &mut [i8]) -> Result<f32, NotFinite> {
        Arch::new().dispatch(Channel { arithmetic: self.arithmetic(), weights, codes })
    }
}

/// One channel, in loops that are compiled for the CPU's vector level.
struct Channel<'a> {
    arithmetic: Arithmetic,
    weights: &'a [bf16],
    codes: &'a mut [i8],
}

impl NullaryFnOnce for Channel<'_> {
    type Output = Result<f32, NotFinite>;

    #[inline(always)]
    fn call(self) -> Self::Output {
        /// Bits of a BF16 infinity; what is above is NaN.
        const INFINITY: u16 = 0x7F80;
        let Self { arithmetic: Arithmetic { steps, narrow, lowest, floor, instead_of_zero }, weights, codes } = self;
        // Magnitudes are ordered as their bits are.
        let magnitude = |weight: &bf16| weight.to_bits() & 0x7FFF;
        let largest = weights.iter().fold(0, |largest, weight| magnitude(weight).max(largest));
        if largest >= INFINITY {
            let index = weights.iter().position(|weight| magnitude(weight) >= INFINITY).unwrap_or_default();
            let value = weights.get(index).map_or(f32::NAN, |weight| weight.to_f32());
            return Err(NotFinite { index, value });
        }
        let rounding = if narrow { Rounding::Rne } else { Rounding::None };
        let scale = round_f32(widen(bf16::from_bits(largest)) / steps, rounding).max(floor);
        let scale = if scale == 0.0 { instead_of_zero } else { scale };
        for (code, weight) in codes.iter_mut().zip(weights) {
            let quotient = round_f32(widen(*weight) / scale, rounding);
            *code = quotient.round_ties_even().clamp(lowest, 127.0) as i32 as i8;
        }
        Ok(scale)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn quantized(rule: Rule, weights: &[f32]) -> (Vec<i8>, f32) {
        let weights: Vec<bf16> = weights.iter().map(|weight| bf16::from_f32(*weight)).collect();
        let mut codes = vec![1; weights.len()];
        let scale = rule.quantize(&weights, &mut codes).unwrap();
        (codes, scale)
    }

    #[test]
    fn the_largest_weight_gets_the_last_code_or_one_more() {
        // Over 127.5 the scale is such that the quotient is 127.5: a tie, which goes to 128, and -128 is a code.
        let weights = [127.0, -127.0, 63.5, 0.0];
        assert_eq!(quantized(Rule::Float32, &weights), (vec![127, -127, 64, 0], 1.0));
        assert_eq!(quantized(Rule::MsModelSlim, &weights), (vec![127, -127, 64, 0], 1.0));
        assert_eq!(quantized(Rule::LlmCompressorFloat32, &weights), (vec![127, -128, 64, 0], 127.0 / 127.5));
        assert_eq!(quantized(Rule::LlmCompressor, &weights), (vec![127, -128, 64, 0], 0.996_093_75));
    }

    #[test]
    fn a_scale_rounded_down_gives_minus_128_unless_it_is_clamped() {
        // 1 / 127 is 0.007874, between BF16 0.00787353515625 and 0.0079040527.
        let weights = [1.0, -1.0];
        assert_eq!(quantized(Rule::Float32, &weights), (vec![127, -127], 1.0 / 127.0));
        assert_eq!(quantized(Rule::MsModelSlim, &weights), (vec![127, -127], 0.007_873_535_156_25));
        // 1.375 / 127 is 0.0108268; the BF16 number below it is 0.0108032, and 1.375 over that 127.277: rounded to
        // 127.5, a tie.
        let weights = [1.375, -1.375];
        assert_eq!(quantized(Rule::Float32, &weights), (vec![127, -127], 1.375 / 127.0));
        assert_eq!(quantized(Rule::MsModelSlim, &weights), (vec![127, -128], 0.010_803_222_656_25));
    }

    #[test]
    fn ties_go_to_even() {
        // The scale is 1 by the rules that divide by 127, so that weights are quotients.
        let weights = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 62.5, -63.5];
        for rule in [Rule::Float32, Rule::MsModelSlim] {
            assert_eq!(quantized(rule, &weights).0, [127, 0, 2, 2, 0, -2, -2, 62, -64], "{rule:?}");
        }
        // And by those that divide by 127.5.
        let weights = [127.5, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 62.5, -127.5];
        for rule in [Rule::LlmCompressor, Rule::LlmCompressorFloat32] {
            assert_eq!(quantized(rule, &weights).0, [127, 0, 2, 2, 0, -2, -2, 62, -128], "{rule:?}");
        }
    }

    #[test]
    fn a_quotient_rounded_to_bf16_may_become_a_tie() {
        // 128 / 127 is 1.0078125 in BF16, and 63 over that 62.51: in BF16 62.5, a tie.
        let weights = [128.0, 63.0];
        assert_eq!(quantized(Rule::Float32, &weights), (vec![127, 63], 128.0 / 127.0));
        assert_eq!(quantized(Rule::MsModelSlim, &weights), (vec![127, 62], 1.007_812_5));
    }

    #[test]
    fn a_channel_of_zeros_has_codes_of_zero_and_a_scale_that_can_be_divided_by() {
        for (rule, scale) in Rule::ALL.into_iter().zip([EPSILON, EPSILON_BF16, EPSILON, EPSILON]) {
            assert_eq!(quantized(rule, &[0.0, -0.0, 0.0]), (vec![0; 3], scale), "{rule:?}");
            assert_eq!(quantized(rule, &[]), (vec![], scale), "{rule:?}");
        }
        // msmodelslim has a floor under every scale, the others none.
        let tiny = 2f32.powi(-30);
        assert_eq!(quantized(Rule::MsModelSlim, &[tiny]), (vec![0], EPSILON));
        assert_eq!(quantized(Rule::Float32, &[tiny]), (vec![127], tiny / 127.0));
    }

    #[test]
    fn the_first_weight_that_is_not_finite_is_told() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let weights = [1.0, value, f32::NAN].map(bf16::from_f32);
            for rule in Rule::ALL {
                let found = rule.quantize(&weights, &mut [0; 3]).unwrap_err();
                assert_eq!(found.index, 1);
                assert_eq!(found.value.to_bits() & 0x7F80_0000, 0x7F80_0000);
            }
        }
    }

    #[test]
    fn names_are_told_apart() {
        for rule in Rule::ALL {
            assert_eq!(Rule::named(rule.name()), Some(rule));
        }
        assert_eq!((Rule::named("amax"), Rule::default()), (None, Rule::ALL[0]));
    }

    proptest! {
        // In FP64, where the quotient of two FP32 numbers cannot be mistaken for a tie that it is not.
        #[test]
        fn codes_are_the_nearest_ones(bits in prop::collection::vec(0u16..0x7F80, 1..70), signs in any::<u128>()) {
            let sign = |index: usize| ((signs >> (index % 128)) as u16 & 1) << 15;
            let weights: Vec<bf16> =
                bits.iter().enumerate().map(|(index, bits)| bf16::from_bits(bits | sign(index))).collect();
            let mut codes = vec![0; weights.len()];
            let scale = Rule::Float32.quantize(&weights, &mut codes).unwrap();
            for (weight, code) in weights.iter().zip(&codes) {
                let quotient = f64::from(weight.to_f32()) / f64::from(scale);
                prop_assert!((quotient - f64::from(*code)).abs() <= 0.500_01, "{weight} / {scale} became {code}");
            }
            prop_assert!(scale < f32::EPSILON || codes.iter().any(|code| code.abs() == 127));
        }
    }
}
