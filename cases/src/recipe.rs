//! Recipes: how the values of a generated input are drawn, as a case file writes them, and which
//! parameters a tensor of a given type can take. The arithmetic itself is in [`crate::seeded`].

use std::fmt;

use reference::DType;
use thiserror::Error;

use crate::yaml::number;

/// How the values of one input are drawn (`docs/seeded-tensors.md`).
#[derive(Clone, Debug, PartialEq)]
pub struct Recipe {
    /// The distribution.
    pub kind: RecipeKind,
    /// Columns that are multiplied by a factor, when there are any.
    pub outlier_columns: Option<OutlierColumns>,
}

/// The distribution of a recipe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RecipeKind {
    /// Nearly normal values.
    Normal {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        std: f64,
        /// Whether values are rounded to BF16 (RNE) whatever the tensor's type.
        bf16: bool,
    },
    /// Nearly normal INT8 codes, clamped to -127..=127.
    Int8Normal {
        /// Standard deviation.
        std: u32,
    },
    /// Uniform values.
    Uniform {
        /// Lower end.
        lo: f64,
        /// Upper end.
        hi: f64,
    },
    /// All 0.
    Zeros,
    /// All 1.
    Ones,
    /// All the same value.
    Constant {
        /// The value.
        value: f64,
    },
}

/// Columns `c` with `c % period == phase` are multiplied by `factor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OutlierColumns {
    /// Distance between outlier columns.
    pub period: usize,
    /// The first outlier column.
    pub phase: usize,
    /// A power of two.
    pub factor: f64,
}

/// Standard deviation of the integer that a normal value is made from, `sqrt((65536^2 - 1) / 3)`.
pub const SIGMA: f64 = 37_837.227_237_206_48;
/// Largest magnitude of that integer.
pub const S_MAX: f64 = 131_070.0;
/// Largest `std` of `int8_normal`; beyond it nearly every code would be clamped, and 32-bit arithmetic overflows.
pub const INT8_STD_MAX: u32 = 4096;

/// A parameter that a recipe or its tensor cannot take.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{message}")]
pub struct RecipeError {
    /// The parameter's key in the case file: `recipe`, `std`, `factor`, ...
    pub parameter: &'static str,
    /// The rule and what was found.
    pub message: String,
    /// What to write instead.
    pub help: &'static str,
}

impl Recipe {
    /// A recipe without outlier columns.
    #[must_use]
    pub fn new(kind: RecipeKind) -> Self {
        Self { kind, outlier_columns: None }
    }

    /// Checks that a tensor of type `dtype` can be generated, with finite values only.
    ///
    /// # Errors
    /// The first parameter that cannot hold.
    pub fn check(&self, dtype: DType) -> Result<(), RecipeError> {
        let fail = |parameter, message, help| Err(RecipeError { parameter, message, help });
        let name = self.kind.name();
        let integers = dtype == DType::I8;
        let fits = match self.kind {
            RecipeKind::Normal { .. } | RecipeKind::Uniform { .. } => !integers,
            RecipeKind::Int8Normal { .. } => integers,
            _ => true,
        };
        if !fits {
            let message = format!("recipe {name} does not fit a tensor of type {}", dtype.name());
            let help = if integers {
                "use int8_normal, zeros, ones or constant"
            } else {
                "use normal, uniform, zeros, ones or constant"
            };
            return fail("recipe", message, help);
        }
        for (parameter, value) in self.kind.numbers() {
            if !value.is_finite() {
                return fail(
                    parameter,
                    format!("{parameter} is {value}, not a finite number"),
                    "write a finite number",
                );
            }
        }
        match self.kind {
            RecipeKind::Normal { std, .. } if std < 0.0 => {
                return fail("std", format!("std is {std}, below 0"), "a standard deviation is 0 or more");
            }
            RecipeKind::Int8Normal { std } if std > INT8_STD_MAX => {
                let help = "codes are clamped to -127..=127; a useful std is about 32";
                return fail("std", format!("std is {std}, above {INT8_STD_MAX}"), help);
            }
            RecipeKind::Uniform { lo, hi } if lo > hi => {
                return fail("lo", format!("lo {lo} is above hi {hi}"), "exchange the two ends");
            }
            RecipeKind::Constant { value }
                if integers && (value.fract() != 0.0 || !(-128.0..=127.0).contains(&value)) =>
            {
                return fail("value", format!("value {value} is no INT8 code"), "write an integer in -128..=127");
            }
            _ => {}
        }
        let mut largest = self.kind.largest();
        if let Some(OutlierColumns { period, phase, factor }) = self.outlier_columns {
            if integers {
                let message = "outlier_columns does not fit a tensor of type INT8".to_owned();
                return fail("outlier_columns", message, "remove it, or raise the tensor's scales instead");
            }
            if period == 0 {
                return fail("period", "period is 0".to_owned(), "write the distance between outlier columns");
            }
            if phase >= period {
                let message = format!("phase {phase} is not below period {period}, so no column is an outlier");
                return fail("phase", message, "write a phase in 0..period");
            }
            // A power of two has an empty mantissa.
            if !(factor.is_normal() && factor > 0.0 && factor.to_bits() & ((1 << 52) - 1) == 0) {
                let message = format!("factor {factor} is no positive power of two, so products would round");
                return fail("factor", message, "write a power of two such as 16.0");
            }
            if !(factor as f32).is_normal() {
                return fail("factor", format!("factor {factor} is outside FP32"), "write a power of two such as 16.0");
            }
            largest *= factor.max(1.0);
        }
        // The largest finite BF16; FP32 tensors are held to it too, as bf16: true may narrow them.
        if largest > f64::from(half::bf16::MAX.to_f32()) {
            let message = format!("values may reach {largest:e}, which neither BF16 nor FP32 holds");
            return fail("recipe", message, "use smaller parameters");
        }
        Ok(())
    }
}

impl RecipeKind {
    /// The name that a case file gives it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal { .. } => "normal",
            Self::Int8Normal { .. } => "int8_normal",
            Self::Uniform { .. } => "uniform",
            Self::Zeros => "zeros",
            Self::Ones => "ones",
            Self::Constant { .. } => "constant",
        }
    }

    /// Real parameters, with their keys.
    fn numbers(self) -> Vec<(&'static str, f64)> {
        match self {
            Self::Normal { mean, std, .. } => vec![("mean", mean), ("std", std)],
            Self::Uniform { lo, hi } => vec![("lo", lo), ("hi", hi)],
            Self::Constant { value } => vec![("value", value)],
            Self::Int8Normal { .. } | Self::Zeros | Self::Ones => vec![],
        }
    }

    /// A magnitude that no value exceeds.
    fn largest(self) -> f64 {
        match self {
            Self::Normal { mean, std, .. } => S_MAX / SIGMA * std + mean.abs(),
            Self::Uniform { lo, hi } => lo.abs().max(hi.abs()).max(hi - lo),
            Self::Constant { value } => value.abs(),
            Self::Int8Normal { .. } | Self::Zeros | Self::Ones => 127.0,
        }
    }
}

/// The recipe as a case file writes it: a flow mapping from which every bit is read back.
impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{recipe: {}", self.kind.name())?;
        match self.kind {
            RecipeKind::Int8Normal { std } => write!(f, ", std: {std}")?,
            kind => {
                for (key, value) in kind.numbers() {
                    write!(f, ", {key}: {}", number(value))?;
                }
            }
        }
        if matches!(self.kind, RecipeKind::Normal { bf16: true, .. }) {
            f.write_str(", bf16: true")?;
        }
        if let Some(OutlierColumns { period, phase, factor }) = self.outlier_columns {
            write!(f, ", outlier_columns: {{period: {period}, phase: {phase}, factor: {factor:?}}}")?;
        }
        f.write_str("}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sigma_is_the_standard_deviation_of_a_sum_of_four_uniforms() {
        assert_eq!(SIGMA, ((65_536.0_f64 * 65_536.0 - 1.0) / 3.0).sqrt());
    }

    #[test]
    fn what_a_tensor_cannot_take_is_named() {
        let normal = Recipe::new(RecipeKind::Normal { mean: 0.0, std: 1.0, bf16: false });
        let codes = Recipe::new(RecipeKind::Int8Normal { std: 32 });
        let with =
            |factor| Recipe { outlier_columns: Some(OutlierColumns { period: 8, phase: 3, factor }), ..normal.clone() };
        let constant = |value| Recipe::new(RecipeKind::Constant { value });
        let uniform = |lo, hi| Recipe::new(RecipeKind::Uniform { lo, hi });
        let spread = |std| Recipe::new(RecipeKind::Normal { mean: 0.0, std, bf16: false });
        for (recipe, dtype, parameter) in [
            (&normal, DType::I8, "recipe"),
            (&codes, DType::Bf16, "recipe"),
            (&Recipe::new(RecipeKind::Int8Normal { std: 5000 }), DType::I8, "std"),
            (&with(3.0), DType::F32, "factor"),
            (&with(-16.0), DType::F32, "factor"),
            (&with(0.0), DType::F32, "factor"),
            (&with(1e300_f64.log2().exp2()), DType::F32, "factor"),
            (&Recipe { outlier_columns: with(2.0).outlier_columns, ..codes.clone() }, DType::I8, "outlier_columns"),
            (&constant(0.5), DType::I8, "value"),
            (&constant(128.0), DType::I8, "value"),
            (&constant(f64::NAN), DType::F32, "value"),
            (&constant(1e39), DType::F32, "recipe"),
            (&uniform(2.0, 1.0), DType::F32, "lo"),
            (&uniform(0.0, f64::INFINITY), DType::F32, "hi"),
            (&spread(-1.0), DType::F32, "std"),
            (&spread(1e38), DType::Bf16, "recipe"),
        ] {
            let found = recipe.check(dtype).map_err(|error| error.parameter);
            assert_eq!(found, Err(parameter), "{recipe} as {}", dtype.name());
        }
        for (recipe, dtype) in
            [(&normal, DType::Bf16), (&codes, DType::I8), (&with(0.5), DType::F32), (&constant(-128.0), DType::I8)]
        {
            assert_eq!(recipe.check(dtype), Ok(()), "{recipe}");
        }
        let phase = OutlierColumns { period: 8, phase: 8, factor: 2.0 };
        let none = Recipe { outlier_columns: Some(phase), ..normal };
        assert_eq!(none.check(DType::F32).map_err(|error| error.parameter), Err("phase"));
    }
}
