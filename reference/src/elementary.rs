//! Elementary functions with the same bits on every platform.
//!
//! Square root and division are IEEE operations. `exp` is evaluated in float64 with additions and
//! multiplications only and rounded once to float32, so that it is the correctly rounded value but
//! for about one argument in a million. A sampled device gets results that are off by up to the ULPs
//! that `docs/verdicts.md` allows it.

use pulp::Arch;

use crate::policy::Freedom;

/// ULPs that a device's `exp` may be off by.
pub const EXP_ULPS: u32 = 2;
/// ULPs that a device's reciprocal and square root may be off by.
pub const ROOT_ULPS: u32 = 1;

/// `1/k!` for the Taylor series of exp, highest power first.
const INVERSE_FACTORIALS: [f64; 12] = [
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];

/// `exp` in float64 with a relative error below 1e-14 for results that are normal numbers; smaller
/// results go to zero. It has no branches, so that loops over it become vector code, with the same bits.
#[must_use]
#[inline(always)]
pub fn exp_f64(x: f64) -> f64 {
    // ln 2 in two parts: the high one has enough trailing zeros for k * LN2_HIGH to be exact.
    const LN2_HIGH: f64 = 6.931_471_803_691_238_164_90e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_700_02e-10;
    // Added to a small integer, it leaves the integer in the lowest bits.
    const INTEGER: f64 = 6_755_399_441_055_744.0;
    let k = (x * std::f64::consts::LOG2_E).round_ties_even();
    let r = (x - k * LN2_HIGH) - k * LN2_LOW;
    let mut series = INVERSE_FACTORIALS[0];
    for coefficient in &INVERSE_FACTORIALS[1..] {
        series = series * r + coefficient;
    }
    let power = f64::from_bits((k + INTEGER).to_bits().wrapping_add(1023) << 52);
    let value = series * power;
    let value = if x < -708.0 { 0.0 } else { value };
    // A NaN passes both comparisons and has made `series` NaN.
    if x > 709.0 { f64::INFINITY } else { value }
}

/// `exp` in float32.
#[must_use]
#[inline]
pub fn exp(x: f32, freedom: Freedom) -> f32 {
    disturb(exp_f64(f64::from(x)) as f32, x, EXP_ULPS, freedom)
}

/// `exp` in float32 of every value. Without freedom to take, the loop runs on the CPU's vector level.
pub fn exp_all(values: &mut [f32], freedom: Freedom) {
    match freedom {
        Freedom::Canonical | Freedom::Emulated => Arch::new().dispatch(
            #[inline(always)]
            || {
                for value in &mut *values {
                    *value = exp_f64(f64::from(*value)) as f32;
                }
            },
        ),
        Freedom::Sampled { .. } | Freedom::Enlarged { .. } => {
            for value in values {
                *value = exp(*value, freedom);
            }
        }
    }
}

/// `1 / sqrt(x)`: a square root, then a reciprocal (`docs/numerics.md`, step 2).
#[must_use]
#[inline]
pub fn inverse_sqrt(x: f32, freedom: Freedom) -> f32 {
    reciprocal(disturb(x.sqrt(), x, ROOT_ULPS, freedom), freedom)
}

/// `1 / sqrt(x)` as one operation: evaluated in float64 and rounded once to float32. It is the correctly rounded
/// value but where that lies within 2^-52 of the middle between two float32 numbers.
#[must_use]
#[inline]
pub fn rsqrt(x: f32, freedom: Freedom) -> f32 {
    disturb((1.0 / f64::from(x).sqrt()) as f32, x, ROOT_ULPS, freedom)
}

/// `1 / x`.
#[must_use]
#[inline]
pub fn reciprocal(x: f32, freedom: Freedom) -> f32 {
    disturb(1.0 / x, x, ROOT_ULPS, freedom)
}

/// Moves `value` by -ulps..=ulps units in the last place, drawn from the seed and the argument's bits.
#[inline]
fn disturb(value: f32, argument: f32, ulps: u32, freedom: Freedom) -> f32 {
    let (seed, ulps) = match freedom {
        Freedom::Canonical | Freedom::Emulated => return value,
        Freedom::Sampled { seed } => (seed, ulps),
        Freedom::Enlarged { seed, gain } => (seed, ulps.saturating_mul(gain).min(1 << 20)),
    };
    if !value.is_normal() || value.abs() == f32::MAX {
        return value;
    }
    let draw = mix(seed ^ mix(u64::from(argument.to_bits()) | u64::from(ulps) << 32));
    let offset = (draw % u64::from(2 * ulps + 1)) as i64 - i64::from(ulps);
    // The exact values of exp(0) and 1/1 are representable; no device misses those.
    if value == 1.0 { value } else { f32::from_bits((i64::from(value.to_bits()) + offset) as u32) }
}

/// The SplitMix64 finalizer: a well-mixed function of 64 bits.
#[must_use]
#[inline]
pub fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::assert_relative_eq;
    use proptest::prelude::*;

    #[test]
    fn exp_at_the_edges() {
        let exp = |x| exp(x, Freedom::Canonical);
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert_eq!(exp(-104.0), 0.0);
        assert!(exp(-100.0) > 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(1.0).to_bits(), std::f32::consts::E.to_bits());
    }

    proptest! {
        #[test]
        fn exp_agrees_with_an_independent_library(x in -87.0f32..88.0) {
            let (ours, theirs) = (exp_f64(f64::from(x)), libm::exp(f64::from(x)));
            assert_relative_eq!(ours, theirs, max_relative = 1e-14);
        }

        #[test]
        fn many_values_at_once_have_the_bits_of_each(values in prop::collection::vec(any::<f32>(), 0..40), seed: u64) {
            for freedom in [Freedom::Canonical, Freedom::Sampled { seed }] {
                let mut all = values.clone();
                exp_all(&mut all, freedom);
                for (x, y) in values.iter().zip(all) {
                    let one = exp(*x, freedom);
                    prop_assert!(one.to_bits() == y.to_bits() || one.is_nan() && y.is_nan());
                }
            }
        }

        #[test]
        fn a_sampled_device_stays_within_its_ulps(x in -80.0f32..80.0, seed: u64) {
            let freedom = Freedom::Sampled { seed };
            let distance = |a: f32, b: f32| a.to_bits().abs_diff(b.to_bits());
            prop_assert!(distance(exp(x, freedom), exp(x, Freedom::Canonical)) <= EXP_ULPS);
            let x = x.abs() + 1e-3;
            prop_assert!(distance(reciprocal(x, freedom), 1.0 / x) <= ROOT_ULPS);
        }
    }
}
