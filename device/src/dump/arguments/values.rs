//! Values of a manifest that are bounded while they are read: what JSON lets a file say in two bytes would otherwise take
//! many more in memory.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::dump::layout::MOST_DIMENSIONS;

/// Functions of a task: a number, or a list of them.
#[derive(Clone, Debug)]
pub(super) struct Functions(pub Vec<i64>);

/// Most functions of a task: one for each kind of core, and more than there are.
const MOST_FUNCTIONS: usize = 64;

/// Sizes of a tensor.
#[derive(Clone, Debug, Default)]
pub(super) struct Shape(pub Vec<usize>);

/// A scalar as the manifest prints it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    Bool(bool),
    Signed(i64),
    Unsigned(u64),
    /// Anything that is not exact.
    Other,
}

/// A list of at most so many numbers.
fn list<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(mut access: A, most: usize) -> Result<Vec<T>, A::Error> {
    let mut values = Vec::new();
    while let Some(value) = access.next_element()? {
        if values.len() == most {
            return Err(Error::custom(format_args!("a list of more than {most} numbers")));
        }
        values.push(value);
    }
    Ok(values)
}

impl<'de> Deserialize<'de> for Functions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Numbers;
        impl<'de> Visitor<'de> for Numbers {
            type Value = Functions;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a function's number or a list of them")
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<Functions, E> {
                Ok(Functions(vec![value]))
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Functions, E> {
                let value = i64::try_from(value).map_err(|_| E::custom("a function's number beyond 2^63"))?;
                Ok(Functions(vec![value]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, access: A) -> Result<Functions, A::Error> {
                list(access, MOST_FUNCTIONS).map(Functions)
            }
        }
        deserializer.deserialize_any(Numbers)
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of sizes")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, access: A) -> Result<Shape, A::Error> {
                list(access, MOST_DIMENSIONS).map(Shape)
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Value;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Bool(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(Value::Signed(value))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(Value::Unsigned(value))
            }
            fn visit_f64<E>(self, _: f64) -> Result<Value, E> {
                Ok(Value::Other)
            }
            fn visit_str<E>(self, _: &str) -> Result<Value, E> {
                Ok(Value::Other)
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Other)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
                while access.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Value::Other)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
                while access.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Value::Other)
            }
        }
        deserializer.deserialize_any(Any)
    }
}
