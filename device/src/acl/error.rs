//! What can go wrong with a device, in words.

use ascend_cl_sys::{CallError, LoadError, MissingSymbol};
use thiserror::Error;

use crate::fault::{Fault, FaultKind};

/// Why a device could not do what it was asked. None of these is an accuracy failure.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AclError {
    /// The library is not there, or is not usable.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The library is too old for what was asked.
    #[error(transparent)]
    Missing(#[from] MissingSymbol),
    /// A call failed.
    #[error("{}", Failed { doing, call, code: *code, said: said.as_deref() })]
    Call {
        /// What was being done.
        doing: String,
        /// The function of AscendCL.
        call: &'static str,
        /// Its code.
        code: i32,
        /// What the runtime says of it.
        said: Option<String>,
    },
    /// The library gave what it must not, or was asked for what it cannot do.
    #[error("{doing}: {call}: {what}")]
    Refused {
        /// What was being done.
        doing: String,
        /// The function of AscendCL.
        call: &'static str,
        /// What does not fit.
        what: &'static str,
    },
    /// There is no such device.
    #[error("there is no device {index}: AscendCL counts {count} here, numbered from 0")]
    NoDevice {
        /// The device asked for.
        index: i32,
        /// Devices that this process may use.
        count: u32,
    },
    /// The device is in use in this process already.
    #[error("device {index} is in use already")]
    InUse {
        /// The device.
        index: i32,
    },
}

impl AclError {
    /// A failed call, with what the runtime says of it.
    pub(crate) fn of(error: CallError, doing: &str, said: Option<String>) -> Self {
        let doing = doing.to_owned();
        match error {
            CallError::Code { call, code } => Self::Call { doing, call, code, said },
            CallError::Missing(missing) => Self::Missing(missing),
            CallError::Refused { call, what } => Self::Refused { doing, call, what },
        }
    }

    /// The same, said to have happened during something more telling.
    pub(crate) fn during(self, what: impl Into<String>) -> Self {
        match self {
            Self::Call { call, code, said, .. } => Self::Call { doing: what.into(), call, code, said },
            Self::Refused { call, what: fault, .. } => Self::Refused { doing: what.into(), call, what: fault },
            other => other,
        }
    }

    /// The code of a call that failed.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Call { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// What is known of that code.
    #[must_use]
    pub fn fault(&self) -> Option<&'static Fault> {
        self.code().and_then(|code| Fault::known(FaultKind::AscendCl, code))
    }
}

/// A failed call in words, without a full stop at the end.
struct Failed<'a> {
    doing: &'a str,
    call: &'a str,
    code: i32,
    said: Option<&'a str>,
}

impl std::fmt::Display for Failed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { doing, call, code, said } = self;
        write!(f, "{doing}: {call} returned ")?;
        match Fault::known(FaultKind::AscendCl, *code) {
            Some(fault) => write!(f, "{fault}")?,
            None => {
                write!(f, "{code}, a code that this program does not know: look it up in CANN's list of error codes")?
            }
        }
        match said {
            Some(said) => write!(f, " (the runtime says: {})", said.trim_end_matches('.')),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(code: i32, said: Option<&str>) -> String {
        AclError::of(CallError::Code { call: "aclrtMalloc", code }, "taking 8 bytes", said.map(str::to_owned))
            .to_string()
    }

    #[test]
    fn a_known_code_is_named_with_advice_and_an_unknown_one_is_not_made_up() {
        let known = failed(207_001, Some("EL0004: no memory."));
        assert!(
            known.starts_with("taking 8 bytes: aclrtMalloc returned ACL_ERROR_RT_MEMORY_ALLOCATION (207001): "),
            "{known}"
        );
        assert!(known.ends_with("(the runtime says: EL0004: no memory)"), "{known}");
        let unknown = failed(999_999, None);
        assert!(unknown.contains("returned 999999, a code that this program does not know"), "{unknown}");
    }

    #[test]
    fn the_more_telling_words_win() {
        let error = AclError::of(CallError::Code { call: "aclrtMalloc", code: 207_001 }, "taking memory", None);
        assert!(
            error.clone().during("taking memory for wq").to_string().starts_with("taking memory for wq: aclrtMalloc")
        );
        assert_eq!((error.code(), error.fault().map(|fault| fault.code)), (Some(207_001), Some(207_001)));
        let absent = AclError::Load(LoadError::Absent(Vec::new()));
        assert_eq!((absent.clone().during("x"), absent.code()), (absent, None));
    }
}
