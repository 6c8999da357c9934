//! Which rounding rules a device is held to: the `policy:` key of a case, or the `--policy` flag
//! (`docs/bundles.md`, The command).

use std::path::Path;

use reference::{Policy, Rounding, Site};

use crate::error::{CaseError, Document, read_text};
use crate::schema::{NameOr, RawSites, Spanned};

/// The rounding rules that a device is held to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyRequest {
    /// Tie rules are read off the device where the contract leaves them to the kernel.
    Auto,
    /// The production kernels' rules.
    Production,
    /// Nearest, ties to even, everywhere.
    Rne,
    /// Given site by site.
    Custom(Policy),
}

impl PolicyRequest {
    /// The value of `--policy`: `auto`, `production`, `rne`, or else a file.
    ///
    /// # Errors
    /// Those of [`Self::load_file`].
    pub fn from_flag(flag: &str) -> Result<Self, CaseError> {
        match Self::named(flag) {
            Some(policy) => Ok(policy),
            None => Self::load_file(Path::new(flag)),
        }
    }

    /// Reads a YAML mapping from site to rule; sites it does not name keep the production rule.
    ///
    /// # Errors
    /// An unreadable file, an unknown site or rule, a rule that its site cannot have.
    pub fn load_file(path: &Path) -> Result<Self, CaseError> {
        if !path.exists() {
            let message = "neither a named policy nor an existing file";
            let help = "write auto, production, rne, or the path of a YAML mapping such as `out: rne`";
            return Err(CaseError::file(path, message, help));
        }
        let text = read_text(path)?;
        Self::parse(&text, path)
    }

    /// Reads the text of a policy file; `path` is for errors.
    ///
    /// # Errors
    /// Those of [`Self::load_file`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, CaseError> {
        let document = Document::new(path, text);
        over_production(&document.read()?, &document)
    }

    /// `auto`, `production`, `rne` or `custom`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Production => "production",
            Self::Rne => "rne",
            Self::Custom(_) => "custom",
        }
    }

    fn named(name: &str) -> Option<Self> {
        [Self::Auto, Self::Production, Self::Rne].into_iter().find(|policy| policy.name() == name)
    }

    pub(crate) fn from_raw(raw: &Spanned<NameOr<RawSites>>, document: &Document<'_>) -> Result<Self, CaseError> {
        match &raw.value {
            NameOr::Name(name) => Self::named(name).ok_or_else(|| {
                let message = format!("policy: no policy is named {name:?}");
                document.error(raw.referenced, message, "write auto, production, rne, or a mapping {site: rule}")
            }),
            NameOr::Mapping(sites) => over_production(sites, document),
        }
    }
}

/// The production policy with the given sites changed.
fn over_production(sites: &RawSites, document: &Document<'_>) -> Result<PolicyRequest, CaseError> {
    let mut policy = Policy::production();
    for (key, value) in &sites.0 {
        let Some(site) = Site::from_name(&key.value) else {
            let help = format!("the sites are {}", Site::ALL.map(Site::name).join(", "));
            return Err(document.error(key.referenced, format!("policy: no cast site is named {:?}", key.value), help));
        };
        let Some(rule) = Rounding::from_name(&value.value) else {
            let message = format!("policy: {}: no rounding rule is named {:?}", key.value, value.value);
            return Err(document.error(value.referenced, message, "write rne, ties_away, trunc or none"));
        };
        if rule == Rounding::None && is_stored(site) {
            let message = format!("policy: {}: none leaves the value in FP32, but this cast is stored", key.value);
            return Err(document.error(value.referenced, message, "write rne, ties_away or trunc"));
        }
        policy.set(site, rule);
    }
    Ok(PolicyRequest::Custom(policy))
}

/// Whether the kernel stores what the site narrows in any case, so that it cannot stay FP32.
fn is_stored(site: Site) -> bool {
    site.is_int8() || matches!(site, Site::KCache | Site::VCache | Site::Out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<PolicyRequest, CaseError> {
        PolicyRequest::parse(text, Path::new("policy.yaml"))
    }

    #[test]
    fn a_mapping_changes_the_production_policy() {
        let expected = Policy::production().with(Site::Out, Rounding::Rne).with(Site::Prob, Rounding::None);
        assert_eq!(parse("out: rne\nprob: none\n").unwrap(), PolicyRequest::Custom(expected));
        assert_eq!(parse("{}").unwrap(), PolicyRequest::Custom(Policy::production()));
    }

    #[test]
    fn faults_are_located() {
        for (text, place, words) in [
            ("out: rne\nattention: rne\n", "policy.yaml:2:1", "attention"),
            ("out: rne\nq: up\n", "policy.yaml:2:4", "\"up\""),
            ("k_cache: none\n", "policy.yaml:1:10", "stored"),
            ("v_cache: none\n", "policy.yaml:1:10", "stored"),
            ("out: none\n", "policy.yaml:1:6", "stored"),
            ("normed_i8: none\n", "policy.yaml:1:12", "stored"),
            ("attn_out_i8: none\n", "policy.yaml:1:14", "stored"),
            ("mlp_norm_i8: none\n", "policy.yaml:1:14", "stored"),
            ("out: rne\nout: rne\n", "policy.yaml:2:1", "twice"),
            ("- out\n", "policy.yaml:1:1", ""),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with(place) && error.contains(words), "{text}{error}");
        }
    }

    #[test]
    fn flags_are_names_or_files() {
        assert_eq!(PolicyRequest::from_flag("rne").unwrap(), PolicyRequest::Rne);
        assert!(PolicyRequest::from_flag("round-to-odd").unwrap_err().to_string().contains("production"));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy.yaml");
        std::fs::write(&path, "out: rne\n").unwrap();
        let flag = path.to_str().unwrap();
        assert_eq!(PolicyRequest::from_flag(flag).unwrap(), parse("out: rne").unwrap());
    }
}
