//! Elements of every type that a dump holds, as numbers: their bits, their place on the line of all numbers of the type,
//! and what they say when printed.

use half::{bf16, f16};
use safetensors::Dtype;
use serde::{Serialize, Serializer};

use crate::report::Number;

/// The value of an element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// Of a 64-bit floating-point type, or of 8 bits.
    Float(f64),
    /// Of a floating-point type that 32 bits hold: printed in as few digits as tell it from its neighbours, and exact in
    /// JSON.
    Single(f32),
    /// Of an integer type; a boolean is 0 or 1.
    Int(i128),
}

impl Serialize for Scalar {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Float(value) => Number(value).serialize(serializer),
            Self::Single(value) => Number(value.into()).serialize(serializer),
            Self::Int(value) => serializer.serialize_i128(value),
        }
    }
}

impl std::fmt::Display for Scalar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Float(value) if is_far_from_one(value) => write!(f, "{value:e}"),
            Self::Float(value) => write!(f, "{}", Number(value)),
            Self::Single(value) if is_far_from_one(value.into()) => write!(f, "{value:e}"),
            Self::Single(value) if value.is_finite() => write!(f, "{value}"),
            Self::Single(value) => write!(f, "{}", Number(value.into())),
            Self::Int(value) => write!(f, "{value}"),
        }
    }
}

/// Whether a number is better read with an exponent.
fn is_far_from_one(value: f64) -> bool {
    value != 0.0 && value.is_finite() && (value.abs() < 1e-5 || value.abs() >= 1e9)
}

impl Scalar {
    /// The value as a floating-point number, rounded where it is a long integer.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        match self {
            Self::Float(value) => value,
            Self::Single(value) => value.into(),
            Self::Int(value) => value as f64,
        }
    }
}

/// An element type. Elements are compared by their bits, and measured by their places.
pub(crate) trait Element: Copy + Send + Sync + PartialEq {
    /// Its bytes.
    const SIZE: usize;
    /// The element that begins some bytes.
    fn read(bytes: &[u8]) -> Self;
    /// Its bits.
    fn bits(self) -> u64;
    /// Its place among all numbers of the type, neighbours one apart and both zeros at one place; none for NaN.
    fn place(self) -> Option<i64>;
    /// Whether it is NaN or infinite.
    fn is_nonfinite(self) -> bool;
    /// Its value.
    fn value(self) -> Scalar;
}

macro_rules! floats {
    ($($name:ident($bits:ty, $signed:ty): infinity $infinity:expr, $value:expr;)*) => {$(
        #[derive(Clone, Copy, PartialEq)]
        pub(crate) struct $name($bits);

        impl Element for $name {
            const SIZE: usize = size_of::<$bits>();

            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                Self(bytes.first_chunk().map_or(0, |bytes| <$bits>::from_le_bytes(*bytes)))
            }

            #[inline(always)]
            fn bits(self) -> u64 {
                self.0.into()
            }

            #[inline(always)]
            fn place(self) -> Option<i64> {
                let magnitude = self.0 & (<$bits>::MAX >> 1);
                if magnitude > $infinity {
                    return None;
                }
                let place = magnitude as i64;
                Some(if (self.0 as $signed) < 0 { -place } else { place })
            }

            #[inline(always)]
            fn is_nonfinite(self) -> bool {
                self.0 & (<$bits>::MAX >> 1) >= $infinity
            }

            #[inline(always)]
            fn value(self) -> Scalar {
                $value(self.0)
            }
        }
    )*};
}

floats! {
    Bf16(u16, i16): infinity 0x7F80, |bits| Scalar::Single(bf16::from_bits(bits).to_f32());
    F16(u16, i16): infinity 0x7C00, |bits| Scalar::Single(f16::from_bits(bits).to_f32());
    F32(u32, i32): infinity 0x7F80_0000, |bits| Scalar::Single(f32::from_bits(bits));
    F64(u64, i64): infinity 0x7FF0_0000_0000_0000, |bits| Scalar::Float(f64::from_bits(bits));
    F8E5M2(u8, i8): infinity 0x7C, |bits: u8| Scalar::Float(f16::from_bits(u16::from(bits) << 8).to_f64());
}

macro_rules! integers {
    ($($name:ident($type:ty, $bits:ty);)*) => {$(
        #[derive(Clone, Copy, PartialEq)]
        pub(crate) struct $name($type);

        impl Element for $name {
            const SIZE: usize = size_of::<$type>();

            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                Self(bytes.first_chunk().map_or(0, |bytes| <$type>::from_le_bytes(*bytes)))
            }

            #[inline(always)]
            fn bits(self) -> u64 {
                (self.0 as $bits).into()
            }

            #[inline(always)]
            fn place(self) -> Option<i64> {
                Some(i64::from(self.0))
            }

            #[inline(always)]
            fn is_nonfinite(self) -> bool {
                false
            }

            #[inline(always)]
            fn value(self) -> Scalar {
                Scalar::Int(self.0.into())
            }
        }
    )*};
}

integers! {
    I8(i8, u8);
    I16(i16, u16);
    I32(i32, u32);
    I64(i64, u64);
    U8(u8, u8);
    U16(u16, u16);
    U32(u32, u32);
}

/// Unsigned 64-bit numbers, placed half of their range further down.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct U64(u64);

impl Element for U64 {
    const SIZE: usize = 8;

    #[inline(always)]
    fn read(bytes: &[u8]) -> Self {
        Self(bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)))
    }

    #[inline(always)]
    fn bits(self) -> u64 {
        self.0
    }

    #[inline(always)]
    fn place(self) -> Option<i64> {
        Some((self.0 ^ (1 << 63)) as i64)
    }

    #[inline(always)]
    fn is_nonfinite(self) -> bool {
        false
    }

    #[inline(always)]
    fn value(self) -> Scalar {
        Scalar::Int(self.0.into())
    }
}

macro_rules! small_floats {
    ($($name:ident: $place:expr, $nonfinite:expr, $value:expr;)*) => {$(
        #[derive(Clone, Copy, PartialEq)]
        pub(crate) struct $name(u8);

        impl Element for $name {
            const SIZE: usize = 1;

            #[inline(always)]
            fn read(bytes: &[u8]) -> Self {
                Self(bytes.first().copied().unwrap_or(0))
            }

            #[inline(always)]
            fn bits(self) -> u64 {
                self.0.into()
            }

            #[inline(always)]
            fn place(self) -> Option<i64> {
                (!self.is_nonfinite()).then(|| $place(self.0))
            }

            #[inline(always)]
            fn is_nonfinite(self) -> bool {
                $nonfinite(self.0)
            }

            fn value(self) -> Scalar {
                Scalar::Float(if self.is_nonfinite() { f64::NAN } else { $value(self.0) })
            }
        }
    )*};
}

small_floats! {
    F8E4M3: signed, |bits| bits & 0x7F == 0x7F, |bits| small(bits, 3, 7);
    F8E4M3Fnuz: signed, |bits| bits == 0x80, |bits| small(bits, 3, 8);
    F8E5M2Fnuz: signed, |bits| bits == 0x80, |bits| small(bits, 2, 16);
    F8E8M0: i64::from, |bits| bits == 0xFF, |bits: u8| 2f64.powi(i32::from(bits) - 127);
}

/// Sign and magnitude as a place.
#[inline(always)]
fn signed(bits: u8) -> i64 {
    let magnitude = i64::from(bits & 0x7F);
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The value of an eight-bit number without infinities: sign, exponent with a bias, and mantissa.
fn small(bits: u8, mantissa_bits: u32, bias: i32) -> f64 {
    let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1));
    let exponent = i32::from((bits & 0x7F) >> mantissa_bits);
    let scale = 2f64.powi(mantissa_bits as i32);
    let magnitude = match exponent {
        0 => mantissa / scale * 2f64.powi(1 - bias),
        _ => (1.0 + mantissa / scale) * 2f64.powi(exponent - bias),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Something that is done with elements of a type that is known at run time only.
pub(crate) trait Work {
    /// What comes of it.
    type Output;
    /// Does it with elements of one type.
    fn run<T: Element>(self) -> Self::Output;
}

/// Does something with elements of a type. The two parts of complex numbers are numbers; types below a byte, which no
/// dump gives, are taken byte by byte.
pub(crate) fn with_type<W: Work>(dtype: Dtype, work: W) -> W::Output {
    match dtype {
        Dtype::BF16 => work.run::<Bf16>(),
        Dtype::F16 => work.run::<F16>(),
        Dtype::F32 | Dtype::C64 => work.run::<F32>(),
        Dtype::F64 => work.run::<F64>(),
        Dtype::I8 => work.run::<I8>(),
        Dtype::I16 => work.run::<I16>(),
        Dtype::I32 => work.run::<I32>(),
        Dtype::I64 => work.run::<I64>(),
        Dtype::U16 => work.run::<U16>(),
        Dtype::U32 => work.run::<U32>(),
        Dtype::U64 => work.run::<U64>(),
        Dtype::F8_E4M3 => work.run::<F8E4M3>(),
        Dtype::F8_E5M2 => work.run::<F8E5M2>(),
        Dtype::F8_E8M0 => work.run::<F8E8M0>(),
        Dtype::F8_E4M3FNUZ => work.run::<F8E4M3Fnuz>(),
        Dtype::F8_E5M2FNUZ => work.run::<F8E5M2Fnuz>(),
        _ => work.run::<U8>(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_floats_have_the_values_of_their_formats() {
        let value = Scalar::as_f64;
        assert_eq!(value(F8E4M3(0x7E).value()), 448.0);
        assert_eq!(value(F8E4M3(0x01).value()), 2f64.powi(-9));
        assert!(value(F8E4M3(0xFF).value()).is_nan() && F8E4M3(0xFF).place().is_none());
        assert_eq!(value(F8E4M3(0xB8).value()), -1.0);
        assert_eq!(value(F8E5M2(0x7B).value()), 57344.0);
        assert_eq!(value(F8E5M2(0xFC).value()), f64::NEG_INFINITY);
        assert_eq!(value(F8E8M0(127).value()), 1.0);
        assert_eq!(value(F8E4M3Fnuz(0x7F).value()), 240.0);
        assert_eq!(value(F8E5M2Fnuz(0x7F).value()), 57344.0);
        assert!(value(F8E5M2Fnuz(0x80).value()).is_nan());
    }

    #[test]
    fn places_keep_order_and_distance() {
        assert_eq!(Bf16(0x8000).place(), Bf16(0).place());
        assert_eq!(Bf16(0x7F80).place(), Some(0x7F80));
        assert_eq!(Bf16(0x7F81).place(), None);
        assert_eq!(F64(f64::MIN.to_bits()).place(), Some(-0x7FEF_FFFF_FFFF_FFFF));
        let distance = |a: u64, b: u64| U64(a).place().unwrap().abs_diff(U64(b).place().unwrap());
        assert_eq!(distance(0, u64::MAX), u64::MAX);
        assert_eq!(distance(1 << 63, (1 << 63) - 1), 1);
        assert_eq!(I8::read(&[0x80]).value(), Scalar::Int(-128));
        assert_eq!(I8::read(&[0x80]).bits(), 0x80);
    }

    #[test]
    fn values_print_shortest() {
        assert_eq!(Scalar::Float(0.5).to_string(), "0.5");
        assert_eq!(Scalar::Single(0.1).to_string(), "0.1");
        assert_eq!(serde_json::to_string(&Scalar::Single(0.1)).unwrap(), "0.10000000149011612");
        assert_eq!(Scalar::Float(1e-30).to_string(), "1e-30");
        assert_eq!(Scalar::Float(f64::NEG_INFINITY).to_string(), "-Infinity");
        assert_eq!(serde_json::to_string(&Scalar::Int(u64::MAX.into())).unwrap(), "18446744073709551615");
    }
}
