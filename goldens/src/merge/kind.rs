//! Which command's reports are to be joined, told by what they hold.

use std::fmt;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::MergeError;
use crate::report::Verdict;

/// Which command's report it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `assay gate`.
    Gate,
    /// `assay power`.
    Power,
    /// `assay tokens check --all`.
    Tokens,
}

impl Kind {
    /// Which one this JSON text is of; what is nothing known is taken for the gate's, whose reader says what is wrong.
    ///
    /// # Errors
    /// It is the report of a refused run.
    pub fn of(file: &str, text: &str) -> Result<Self, MergeError> {
        #[derive(Deserialize)]
        struct Shape {
            verdict: Option<Value>,
            message: Option<Value>,
            faults: Option<IgnoredAny>,
            goldens: Option<IgnoredAny>,
        }
        let Ok(shape) = serde_json::from_str::<Shape>(text) else { return Ok(Self::Gate) };
        if shape.verdict.as_ref().and_then(Value::as_str) == Some(Verdict::Error.name()) {
            let message = shape.message.as_ref().and_then(Value::as_str).unwrap_or("it does not say why");
            return Err(MergeError::Refused { file: file.to_owned(), message: message.to_owned() });
        }
        Ok(match (shape.faults, shape.goldens) {
            (_, Some(_)) => Self::Tokens,
            (Some(_), None) => Self::Power,
            (None, None) => Self::Gate,
        })
    }

    /// Which one all of these are of, each with the file that it was read from.
    ///
    /// # Errors
    /// They are of several, or one is of a refused run.
    pub fn of_all(texts: &[(&str, &str)]) -> Result<Self, MergeError> {
        let mut first = None;
        for (file, text) in texts {
            let kind = Self::of(file, text)?;
            let (first_file, first) = *first.get_or_insert((file, kind));
            if kind != first {
                let (file, first_file) = ((*file).to_owned(), (*first_file).to_owned());
                return Err(MergeError::Kinds { file, kind, first_file, first });
            }
        }
        first.map(|(_, kind)| kind).ok_or(MergeError::Nothing)
    }

    /// What one entry of such a report is.
    #[must_use]
    pub fn entry(self) -> &'static str {
        match self {
            Self::Gate | Self::Power => "case",
            Self::Tokens => "golden",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gate => "`assay gate`",
            Self::Power => "`assay power`",
            Self::Tokens => "`assay tokens check --all`",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_told_apart_by_what_they_hold() {
        let (gate, power) = (r#"{"verdict": "pass", "cases": []}"#, r#"{"cases": [], "faults": []}"#);
        let tokens = r#"{"verdict": "pass", "goldens": []}"#;
        for (text, kind) in [(gate, Kind::Gate), (power, Kind::Power), (tokens, Kind::Tokens), ("[", Kind::Gate)] {
            assert_eq!(Kind::of_all(&[("a", text), ("b", text)]).unwrap(), kind);
        }
        let told = Kind::of_all(&[("a", gate), ("b", tokens)]).unwrap_err().to_string();
        assert!(
            told.starts_with("b: is a report of `assay tokens check --all`, and a is one of `assay gate`"),
            "{told}"
        );
        let refused = r#"{"verdict": "error", "message": "x.yaml: wrong", "cases": []}"#;
        let told = Kind::of_all(&[("a", tokens), ("b", refused)]).unwrap_err().to_string();
        assert!(told.starts_with("b: the run was refused") && told.ends_with("x.yaml: wrong"), "{told}");
        assert!(matches!(Kind::of_all(&[]), Err(MergeError::Nothing)));
    }
}
