//! Narrowing: FP32 to BF16 and scaled FP32 to INT8, under each rounding rule a policy can name
//! (`docs/numerics.md`, Rounding).

use half::bf16;

/// How a value is narrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rounding {
    /// Nearest, ties to even.
    Rne,
    /// Nearest, ties away from zero.
    TiesAway,
    /// Toward zero.
    Trunc,
    /// Not narrowed: the value stays FP32 for the steps that follow.
    None,
}

impl Rounding {
    /// Every rule, in the order in which they are documented.
    pub const ALL: [Self; 4] = [Self::Rne, Self::TiesAway, Self::Trunc, Self::None];

    /// The name used in case files and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Rne => "rne",
            Self::TiesAway => "ties_away",
            Self::Trunc => "trunc",
            Self::None => "none",
        }
    }

    /// The rule with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.name() == name)
    }
}

/// The BF16 pattern that every NaN becomes.
pub const BF16_NAN: bf16 = bf16::from_bits(0x7FC0);

/// Narrows one FP32 value to BF16. `Rounding::None` cannot be stored and narrows as RNE here; stages
/// that honour it keep the wide value instead ([`round_f32`]).
#[must_use]
#[inline(always)]
pub fn to_bf16(value: f32, rule: Rounding) -> bf16 {
    let bits = value.to_bits();
    let nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    // What is added below the last bit that stays, and whether that bit is added too: without branches in a loop.
    let (increment, last) = match rule {
        Rounding::Rne | Rounding::None => (0x7FFF, 1),
        Rounding::TiesAway => (0x8000, 0),
        Rounding::Trunc => (0, 0),
    };
    let increment = increment + ((bits >> 16) & last);
    // A carry out of the mantissa moves to the next binade, and from the last one to infinity: what
    // IEEE rounding asks for. An infinity has a zero mantissa, so no increment reaches it.
    let rounded = (bits.wrapping_add(increment) >> 16) as u16;
    bf16::from_bits(if nan { BF16_NAN.to_bits() } else { rounded })
}

/// Widens one BF16 value, which is exact: a shift of its bits.
#[must_use]
#[inline(always)]
pub fn widen(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Narrows under `rule` and widens again: what later steps see of a cast value.
#[must_use]
#[inline(always)]
pub fn round_f32(value: f32, rule: Rounding) -> f32 {
    if rule == Rounding::None { value } else { widen(to_bf16(value, rule)) }
}

/// Whether `value` lies exactly midway between two BF16 neighbours.
#[must_use]
#[inline]
pub fn is_bf16_tie(value: f32) -> bool {
    value.to_bits() & 0xFFFF == 0x8000 && value.is_finite()
}

/// One INT8 activation code: `clamp(rint(scaled), -127, 127)`; NaN gives 0
/// (`docs/numerics.md`, step 3 and Rounding).
#[must_use]
#[inline(always)]
pub fn to_code(scaled: f32, rule: Rounding) -> i8 {
    let rounded = match rule {
        Rounding::Rne | Rounding::None => scaled.round_ties_even(),
        Rounding::TiesAway => scaled.round(),
        Rounding::Trunc => scaled.trunc(),
    };
    let code = if rounded.is_nan() { 0.0 } else { rounded.clamp(-127.0, 127.0) };
    // Added to 1.5 * 2^23, an integer is the lowest bits of the sum. Unlike a cast, which saturates, that vectorizes.
    (code + 12_582_912.0).to_bits() as i8
}

/// Whether `scaled` lies exactly midway between two integers that the clamp does not merge.
#[must_use]
#[inline]
pub fn is_code_tie(scaled: f32) -> bool {
    let magnitude = scaled.abs();
    magnitude < 127.0 && magnitude.fract() == 0.5
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_field_case_of_a_tie() {
        // 1.01953125 lies midway between 1.015625 (even) and 1.0234375.
        assert!(is_bf16_tie(1.019_531_25));
        assert_eq!(to_bf16(1.019_531_25, Rounding::Rne).to_f32(), 1.015_625);
        assert_eq!(to_bf16(1.019_531_25, Rounding::TiesAway).to_f32(), 1.023_437_5);
        assert_eq!(to_bf16(1.019_531_25, Rounding::Trunc).to_f32(), 1.015_625);
        assert_eq!(to_bf16(-1.019_531_25, Rounding::TiesAway).to_f32(), -1.023_437_5);
    }

    #[test]
    fn nan_infinity_and_overflow() {
        for rule in Rounding::ALL {
            assert_eq!(to_bf16(f32::NAN, rule).to_bits(), 0x7FC0);
            assert_eq!(to_bf16(-f32::NAN, rule).to_bits(), 0x7FC0);
            assert_eq!(to_bf16(f32::INFINITY, rule).to_bits(), 0x7F80);
            assert_eq!(to_bf16(f32::NEG_INFINITY, rule).to_bits(), 0xFF80);
            assert_eq!(to_code(f32::NAN, rule), 0);
            assert_eq!(to_code(f32::INFINITY, rule), 127);
            assert_eq!(to_code(-1e30, rule), -127);
        }
        assert_eq!(to_bf16(f32::MAX, Rounding::Rne), bf16::INFINITY);
        assert_eq!(to_bf16(f32::MAX, Rounding::Trunc), bf16::MAX);
    }

    #[test]
    fn codes_at_ties() {
        assert_eq!((to_code(0.5, Rounding::Rne), to_code(0.5, Rounding::TiesAway)), (0, 1));
        assert_eq!((to_code(-2.5, Rounding::Rne), to_code(-2.5, Rounding::TiesAway)), (-2, -3));
        assert!(is_code_tie(126.5) && !is_code_tie(127.5) && !is_code_tie(0.25));
    }

    proptest! {
        #[test]
        fn rne_agrees_with_half(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            prop_assume!(!value.is_nan());
            prop_assert_eq!(to_bf16(value, Rounding::Rne), bf16::from_f32(value));
        }

        #[test]
        fn rules_differ_only_where_they_may(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            prop_assume!(value.is_finite());
            let (rne, away) = (to_bf16(value, Rounding::Rne), to_bf16(value, Rounding::TiesAway));
            if !is_bf16_tie(value) {
                prop_assert_eq!(rne, away);
            }
            prop_assert!(to_bf16(value, Rounding::Trunc).to_f32().abs() <= value.abs());
        }
    }
}
