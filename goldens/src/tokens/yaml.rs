//! A golden as YAML: a writer whose lines are made to be read and compared, and a reader that takes back every bit of
//! it and refuses what contradicts itself. A step's `id`, `margin` and `kind` follow from its `top` and `spreads`;
//! they are there for people, and a file in which they do not follow was edited by hand.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Write as _};
use std::path::{Path, PathBuf};

use reference::generate::Limits;
use reference::{BATCH, Geometry, Policy, Rounding, Site};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use thiserror::Error;

use super::golden::{Accepted, Candidate, FORMAT, Golden, Model, Row, Step, Stop};
use super::spread::MOST_SAMPLES;
use super::store::is_date;

/// A file that is no golden.
#[derive(Debug, Error)]
#[error("{}{}: {message}; {help}", path.display(), Place(*place))]
pub struct GoldenError {
    /// The file.
    pub path: PathBuf,
    /// Line and column of the fault, from 1, where there is one.
    pub place: Option<(u64, u64)>,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub help: String,
}

struct Place(Option<(u64, u64)>);

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |(line, column)| write!(f, ":{line}:{column}"))
    }
}

impl GoldenError {
    pub(super) fn file(path: &Path, message: impl Into<String>, help: impl Into<String>) -> Self {
        Self { path: path.to_owned(), place: None, message: message.into(), help: help.into() }
    }
}

/// What to do about a file that contradicts itself.
const RECORD: &str = "goldens are written by `tokens record`, not by hand; restore the file or record it again";

impl Golden {
    /// The text of the golden's file. [`Golden::parse`] gives back the same golden, bit for bit.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        let mut out = Lines(String::new());
        out.line(0, "format", FORMAT);
        out.line(0, "name", quoted(&self.name));
        out.line(0, "tool", quoted(&self.tool));
        if let Some(Accepted { reason, date }) = &self.accepted {
            out.heading(0, "accepted");
            out.line(2, "reason", quoted(reason));
            out.line(2, "date", quoted(date));
        }
        out.heading(0, "model");
        out.line(2, "name", quoted(&self.model.name));
        out.line(2, "fingerprint", quoted(&self.model.fingerprint));
        out.heading(2, "geometry");
        let sizes = &self.model.geometry;
        for (name, size) in [
            ("hidden_size", sizes.hidden_size),
            ("num_attention_heads", sizes.num_attention_heads),
            ("num_key_value_heads", sizes.num_key_value_heads),
            ("head_dim", sizes.head_dim),
            ("intermediate_size", sizes.intermediate_size),
            ("num_hidden_layers", sizes.num_hidden_layers),
            ("vocab_size", sizes.vocab_size),
            ("real_vocab_size", sizes.real_vocab_size),
        ] {
            out.line(4, name, size);
        }
        out.line(4, "rms_norm_eps", number(sizes.rms_norm_eps));
        out.heading(0, "policy");
        for site in Site::ALL {
            out.line(2, site.name(), self.policy.at(site).name());
        }
        out.heading(0, "limits");
        out.line(2, "max_new_tokens", self.limits.max_new_tokens);
        out.line(2, "max_seq_len", self.limits.max_seq_len);
        out.line(2, "stop_ids", list(&self.limits.stop_ids));
        out.line(0, "samples", self.samples);
        out.line(0, "false_alarm", double(self.false_alarm));
        out.heading(0, "rows");
        for row in &self.rows {
            out.line(0, "- prompt_ids", list(&row.prompt_ids));
            for (key, text) in [("prompt", &row.prompt), ("text", &row.text)] {
                if let Some(text) = text {
                    out.line(2, key, quoted(text));
                }
            }
            out.line(2, "token_ids", list(&row.token_ids()));
            out.line(2, "stop", row.stop.name());
            out.heading(2, "steps");
            for step in &row.steps {
                out.line(2, "- id", step.id());
                out.line(4, "kind", step.kind(self).name());
                out.line(4, "margin", number(step.margin()));
                out.line(4, "spread", number(step.spread()));
                let logits = step.top.iter().map(|of| format!("{}: {}", of.id, number(of.logit)));
                out.line(4, "top", format!("{{{}}}", joined(logits)));
                let spreads = step.top.iter().skip(1).map(|of| format!("{}: {}", of.id, number(of.spread)));
                out.line(4, "spreads", format!("{{{}}}", joined(spreads)));
            }
        }
        out.0
    }

    /// Reads the text of a golden; `path` is for errors.
    ///
    /// # Errors
    /// What is wrong, with line and column where the text is at fault, else with row and step.
    pub fn parse(text: &str, path: &Path) -> Result<Self, GoldenError> {
        // The rows of a long run hold millions of numbers; whoever calls this has limited the file.
        let options = serde_yaml::options! {
            budget: serde_yaml::budget! { max_events: 1 << 26, max_nodes: 1 << 25 },
            non_finite_float_policy: serde_yaml::NonFiniteFloatPolicy::PassThrough,
        };
        let raw: Raw = serde_yaml::from_str_with_options(text, options).map_err(|error| syntax(&error, path))?;
        raw.check().map_err(|message| GoldenError::file(path, short(&message), RECORD))
    }
}

/// As much of a message as is read: what it repeats of the file may be as long as the file.
fn short(message: &str) -> String {
    message.chars().take(500).collect()
}

/// An error of the reader, in a line of its own words.
fn syntax(error: &serde_yaml::Error, path: &Path) -> GoldenError {
    use serde_yaml::MessageFormatter as _;
    let error = error.without_snippet();
    let message = serde_yaml::UserMessageFormatter.format_message(error);
    let message = short(message.lines().next().unwrap_or_default().trim());
    let place = error.location().map(|location| (location.line(), location.column()));
    GoldenError { path: path.to_owned(), place, message, help: RECORD.to_owned() }
}

struct Lines(String);

impl Lines {
    // Writing to a string cannot fail, so results are dropped.
    fn line(&mut self, indent: usize, key: &str, value: impl Display) {
        let _ = writeln!(self.0, "{:indent$}{key}: {value}", "");
    }

    fn heading(&mut self, indent: usize, key: &str) {
        let _ = writeln!(self.0, "{:indent$}{key}:", "");
    }
}

fn joined(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

fn list(ids: &[usize]) -> String {
    format!("[{}]", joined(ids.iter().map(usize::to_string)))
}

/// The shortest text that gives back the bits of an FP32 number that is not NaN.
fn number(value: f32) -> String {
    spelled(format!("{value:?}"))
}

fn double(value: f64) -> String {
    spelled(format!("{value:?}"))
}

/// A number as every reader of YAML takes it: infinity by its own name, a point and a sign in the exponent.
fn spelled(text: String) -> String {
    match text.as_str() {
        "inf" => return ".inf".to_owned(),
        "-inf" => return "-.inf".to_owned(),
        "NaN" => return ".nan".to_owned(),
        _ => {}
    }
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    let point = if mantissa.contains('.') { "" } else { ".0" };
    let sign = if exponent.starts_with('-') { "" } else { "+" };
    format!("{mantissa}{point}e{sign}{exponent}")
}

/// Text in double quotes, on one line. What cannot be seen or reorders what is seen is escaped.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for character in text.chars() {
        let hidden = character.is_control()
            || matches!(character, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
            || matches!(character, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{fffe}' | '\u{ffff}');
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            // Writing to a string cannot fail.
            hidden_one if hidden => drop(write!(out, "\\u{:04x}", u32::from(hidden_one))),
            other if u32::from(other) & 0xfffe == 0xfffe => drop(write!(out, "\\U{:08x}", u32::from(other))),
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    format: u64,
    name: String,
    tool: String,
    accepted: Option<RawAccepted>,
    model: RawModel,
    policy: Pairs<String, String>,
    limits: RawLimits,
    samples: u32,
    false_alarm: f64,
    rows: Vec<RawRow>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawAccepted {
    reason: String,
    date: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawModel {
    name: String,
    fingerprint: String,
    geometry: RawGeometry,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawGeometry {
    hidden_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    vocab_size: usize,
    real_vocab_size: usize,
    rms_norm_eps: f32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLimits {
    max_new_tokens: usize,
    max_seq_len: usize,
    stop_ids: Vec<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRow {
    prompt_ids: Vec<usize>,
    prompt: Option<String>,
    text: Option<String>,
    token_ids: Vec<usize>,
    stop: String,
    steps: Vec<RawStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawStep {
    id: usize,
    kind: String,
    margin: f32,
    spread: f32,
    top: Pairs<usize, f32>,
    spreads: Pairs<usize, f32>,
}

/// A mapping in the order of the file.
struct Pairs<K, V>(Vec<(K, V)>);

impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> Deserialize<'de> for Pairs<K, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Ordered<K, V>(std::marker::PhantomData<(K, V)>);
        impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> Visitor<'de> for Ordered<K, V> {
            type Value = Pairs<K, V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Ordered(std::marker::PhantomData))
    }
}

impl Raw {
    fn check(self) -> Result<Golden, String> {
        if self.format != FORMAT {
            return Err(format!("format: is {}; this program reads {FORMAT}", self.format));
        }
        let geometry = self.model.geometry.check()?;
        let samples = self.samples;
        if !(1..=MOST_SAMPLES).contains(&samples) {
            return Err(format!("samples: is {samples}; expected 1 to {MOST_SAMPLES}"));
        }
        if !(self.false_alarm > 0.0 && self.false_alarm < 0.5) {
            return Err(format!("false_alarm: is {}; expected a probability between 0 and 0.5", self.false_alarm));
        }
        if self.rows.is_empty() {
            return Err("rows: there are none".to_owned());
        }
        if self.rows.len() > BATCH {
            return Err(format!("rows: there are {}; a run has at most {BATCH}", self.rows.len()));
        }
        if let Some(accepted) = &self.accepted {
            accepted.check()?;
        }
        let RawLimits { max_new_tokens, max_seq_len, stop_ids } = self.limits;
        let RawModel { name, fingerprint, .. } = self.model;
        if fingerprint.len() != 64 || !fingerprint.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(format!("model.fingerprint: is {fingerprint:?}; expected 64 digits of 0-9 and a-f"));
        }
        let mut golden = Golden {
            name: self.name,
            tool: self.tool,
            accepted: self.accepted.map(|RawAccepted { reason, date }| Accepted { reason, date }),
            model: Model { name, fingerprint, geometry },
            policy: policy(&self.policy.0)?,
            limits: Limits { max_new_tokens, max_seq_len, stop_ids },
            samples,
            false_alarm: self.false_alarm,
            rows: Vec::new(),
        };
        for (index, row) in self.rows.into_iter().enumerate() {
            let row = row.check(&golden).map_err(|message| format!("row {index}: {message}"))?;
            golden.rows.push(row);
        }
        Ok(golden)
    }
}

impl RawAccepted {
    fn check(&self) -> Result<(), String> {
        if self.reason.trim().is_empty() {
            return Err("accepted.reason: is empty; a golden is accepted for a reason".to_owned());
        }
        if !is_date(&self.date) {
            return Err(format!("accepted.date: is {:?}; expected a day, YYYY-MM-DD", self.date));
        }
        Ok(())
    }
}

impl RawGeometry {
    fn check(&self) -> Result<Geometry, String> {
        let geometry = Geometry {
            hidden_size: self.hidden_size,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            vocab_size: self.vocab_size,
            real_vocab_size: self.real_vocab_size,
            rms_norm_eps: self.rms_norm_eps,
        };
        geometry.validate().map_err(|error| format!("model.geometry: {error}"))?;
        Ok(geometry)
    }
}

fn policy(pairs: &[(String, String)]) -> Result<Policy, String> {
    let mut policy = Policy::rne();
    let mut seen = BTreeSet::new();
    for (name, rule) in pairs {
        let site = Site::from_name(name).ok_or_else(|| format!("policy: no cast site is named {name:?}"))?;
        let rule = Rounding::from_name(rule).ok_or_else(|| format!("policy: no rounding rule is named {rule:?}"))?;
        policy.set(site, rule);
        seen.insert(site);
    }
    match Site::ALL.into_iter().find(|site| !seen.contains(site)) {
        Some(missing) => Err(format!("policy: no rule for {}", missing.name())),
        None => Ok(policy),
    }
}

impl RawRow {
    fn check(self, golden: &Golden) -> Result<Row, String> {
        let vocabulary = golden.model.geometry.real_vocab_size;
        let stop = Stop::from_name(&self.stop).ok_or_else(|| format!("stop: nothing is named {:?}", self.stop))?;
        if self.prompt_ids.is_empty() {
            return Err("prompt_ids: there are none".to_owned());
        }
        if let Some(id) = self.prompt_ids.iter().find(|id| **id >= vocabulary) {
            return Err(format!("prompt_ids: {id} is not in the vocabulary of {vocabulary}"));
        }
        let mut steps = Vec::new();
        for (index, step) in self.steps.into_iter().enumerate() {
            steps.push(step.check(golden).map_err(|message| format!("step {index}: {message}"))?);
        }
        let row = Row { prompt_ids: self.prompt_ids, prompt: self.prompt, text: self.text, stop, steps };
        if row.token_ids() != self.token_ids {
            return Err("token_ids: are not the ids of the steps".to_owned());
        }
        let stops = |step: &Step| golden.limits.stop_ids.contains(&step.id());
        let last = row.steps.last().ok_or("steps: there are none")?;
        if let Some(early) = row.steps.iter().rev().skip(1).rev().position(stops) {
            return Err(format!("step {early}: is a stop id, and steps follow it"));
        }
        let (Limits { max_new_tokens, max_seq_len, .. }, tokens) = (&golden.limits, row.steps.len());
        if tokens > *max_new_tokens {
            return Err(format!("steps: there are {tokens}, more than max_new_tokens, which is {max_new_tokens}"));
        }
        let length = row.prompt_ids.len() + tokens;
        if length > *max_seq_len {
            return Err(format!("steps: prompt and steps are {length} tokens, more than max_seq_len, {max_seq_len}"));
        }
        let due = if stops(last) {
            Stop::Eos
        } else if tokens == *max_new_tokens {
            Stop::MaxNewTokens
        } else if length == *max_seq_len {
            Stop::MaxSeqLen
        } else {
            return Err(format!(
                "stop: is {}, but the last id is {}, there are {tokens} of {max_new_tokens} steps, and prompt and \
                 steps are {length} of {max_seq_len} tokens: nothing ends the row",
                stop.name(),
                last.id()
            ));
        };
        if stop != due {
            return Err(format!(
                "stop: is {}, but {} ends the row: the last id is {}, there are {tokens} of {max_new_tokens} steps, \
                 and prompt and steps are {length} of {max_seq_len} tokens",
                stop.name(),
                due.name(),
                last.id()
            ));
        }
        Ok(row)
    }
}

impl RawStep {
    fn check(self, golden: &Golden) -> Result<Step, String> {
        let vocabulary = golden.model.geometry.real_vocab_size;
        let mut ids = BTreeSet::new();
        let mut top: Vec<Candidate> = Vec::new();
        for (index, &(id, logit)) in self.top.0.iter().enumerate() {
            let spread = match index {
                0 => 0.0,
                _ => self.spreads.0.get(index - 1).filter(|of| of.0 == id).map_or(f32::NAN, |of| of.1),
            };
            if id >= vocabulary {
                return Err(format!("top: {id} is not in the vocabulary of {vocabulary}"));
            }
            if !ids.insert(id) {
                return Err(format!("top: {id} is given twice"));
            }
            if !logit.is_finite() {
                return Err(format!("top: the logit of {id} is {}; expected a finite number", number(logit)));
            }
            // Of equal logits the lower id comes first, and is the one chosen.
            let before = |before: &Candidate| logit > before.logit || (logit == before.logit && id < before.id);
            if top.last().is_some_and(before) {
                return Err(format!("top: the logit of {id} is out of order"));
            }
            if spread.is_nan() || spread < 0.0 {
                return Err(format!("spreads: expected a number of 0 or more for {id}, in the order of top"));
            }
            top.push(Candidate { id, logit, spread });
        }
        if top.is_empty() || self.spreads.0.len() + 1 != top.len() {
            return Err("top, spreads: expected at least one id, and a spread for each but the first".to_owned());
        }
        let step = Step { top };
        for (key, written, follows) in [
            ("id", self.id.to_string(), step.id().to_string()),
            ("kind", self.kind, step.kind(golden).name().to_owned()),
            ("margin", number(self.margin), number(step.margin())),
            ("spread", number(self.spread), number(step.spread())),
        ] {
            if written != follows {
                return Err(format!("{key}: is {written}, but {follows} follows from top and spreads"));
            }
        }
        Ok(step)
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::tests::{golden, row, step};
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Golden, GoldenError> {
        Golden::parse(text, Path::new("goldens/tokens/small.yaml"))
    }

    fn small() -> Golden {
        let steps = vec![step(&[(5, 3.25, 0.0), (7, 2.5, 0.125)]), step(&[(99, 1e-20, 0.0), (2, -0.0, 1.5e-9)])];
        let mut golden = golden(vec![row(&[1, 2, 3], Stop::Eos, steps)]);
        golden.rows[0].prompt = Some("介绍一下\n\"北京\"故宫 \u{202e}\u{7f}\\".into());
        golden.rows[0].text = Some(" - yes: #no\t{}".into());
        golden.accepted = Some(Accepted { reason: "first".into(), date: "2026-01-31".into() });
        golden
    }

    #[test]
    fn a_golden_reads_like_this() {
        let expected = r#"  - id: 5
    kind: near_tie
    margin: 0.75
    spread: 0.125
    top: {5: 3.25, 7: 2.5}
    spreads: {7: 0.125}
  - id: 99
    kind: near_tie
    margin: 1.0e-20
    spread: 1.5e-9
"#;
        let text = small().to_yaml();
        assert!(text.contains(expected), "{text}");
        assert!(
            text.contains("- prompt_ids: [1, 2, 3]\n  prompt: \"介绍一下\\n\\\"北京\\\"故宫 \\u202e\\u007f\\\\\"\n"),
            "{text}"
        );
        assert!(text.lines().all(|line| line.trim_end() == line), "{text}");
    }

    #[test]
    fn a_golden_is_read_back() {
        let golden = small();
        assert_eq!(read(&golden.to_yaml()).unwrap(), golden);
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let text = small().to_yaml();
        let seen = |from: &str, to: &str| {
            let changed = text.replacen(from, to, 1);
            assert_ne!(changed, text, "{from}");
            read(&changed).unwrap_err().to_string()
        };
        for (from, to, words) in [
            ("format: 1", "format: 2", "this program reads 1"),
            ("margin: 0.75", "margin: 0.7", "row 0: step 0: margin: is 0.7, but 0.75 follows"),
            ("kind: near_tie", "kind: firm", "step 0: kind"),
            ("token_ids: [5, 99]", "token_ids: [5, 98]", "token_ids"),
            ("top: {5: 3.25, 7: 2.5}", "top: {5: 3.25, 7: 4.5}", "out of order"),
            ("top: {5: 3.25, 7: 2.5}", "top: {5: 3.25, 4: 3.25}", "out of order"),
            ("top: {5: 3.25, 7: 2.5}", "top: {5: .inf, 7: 2.5}", "step 0: top: the logit of 5 is .inf"),
            ("top: {5: 3.25, 7: 2.5}", "top: {5: 3.25, 7: -.inf}", "step 0: top: the logit of 7 is -.inf"),
            ("top: {5: 3.25, 7: 2.5}", "top: {5: .nan, 7: 2.5}", "step 0: top: the logit of 5 is .nan"),
            ("top: {5: 3.25, 7: 2.5}", "top: {5: 3.25, 700: 2.5}", "700 is not in the vocabulary of 100"),
            ("spreads: {7: 0.125}", "spreads: {8: 0.1}", "spreads"),
            ("spreads: {7: 0.125}", "spreads: {7: -0.1}", "spreads"),
            ("stop: eos", "stop: max_new_tokens", "stop: is max_new_tokens, but eos ends the row: the last id is 99"),
            ("stop: eos", "stop: max_seq_len", "stop: is max_seq_len, but eos ends the row"),
            ("stop_ids: [98, 99]", "stop_ids: [98]", "stop: is eos, but the last id is 99, there are 2 of 4 steps"),
            ("max_new_tokens: 4", "max_new_tokens: 1", "row 0: steps: there are 2, more than max_new_tokens"),
            ("max_seq_len: 256", "max_seq_len: 4", "row 0: steps: prompt and steps are 5 tokens"),
            ("fingerprint: \"ab", "fingerprint: \"", "model.fingerprint"),
            ("fingerprint: \"ab", "fingerprint: \"xy", "model.fingerprint"),
            ("fingerprint: \"ab", "fingerprint: \"AB", "model.fingerprint"),
            ("reason: \"first\"", "reason: \" \"", "accepted.reason: is empty"),
            ("date: \"2026-01-31\"", "date: \"yesterday\"", "accepted.date: is \"yesterday\""),
            ("date: \"2026-01-31\"", "date: \"2026-02-30\"", "accepted.date"),
            ("stop_ids: [98, 99]", "stop_ids: [5, 99]", "steps follow it"),
            ("  out: ties_away\n", "", "policy: no rule for out"),
            ("samples: 16", "samples: 0", "samples"),
            ("head_dim: 128", "head_dim: 127", "model.geometry"),
        ] {
            let error = seen(from, to);
            assert!(error.starts_with("goldens/tokens/small.yaml: ") && error.contains(words), "{error}");
        }
        assert!(seen("stop: eos", &format!("stop: {}", "x".repeat(5000))).len() < 700);
        assert!(seen("fingerprint: \"ab", &format!("fingerprint: \"{}", "ab".repeat(5000))).len() < 700);
        let line = 1 + text.lines().position(|line| line.starts_with("samples")).unwrap();
        assert!(seen("samples: 16", "samples: many").starts_with(&format!("goldens/tokens/small.yaml:{line}:")));
        assert!(seen("limits:", "limit:").contains("limit"));
        assert!(read("").is_err() && read("[1, 2").is_err());
    }

    #[test]
    fn a_row_ends_for_the_reason_that_its_limits_give() {
        let firm = || step(&[(5, 3.25, 0.0), (7, 2.5, 0.0)]);
        let ends = |count: usize, most: usize, stop| {
            let mut golden = golden(vec![row(&[1, 2, 3], stop, (0..count).map(|_| firm()).collect())]);
            golden.limits.max_seq_len = most;
            read(&golden.to_yaml()).map(|_| ()).map_err(|error| error.message)
        };
        assert_eq!(ends(4, 256, Stop::MaxNewTokens), Ok(()));
        // Where both limits are reached the tokens' own comes first.
        assert_eq!(ends(4, 7, Stop::MaxNewTokens), Ok(()));
        assert_eq!(ends(2, 5, Stop::MaxSeqLen), Ok(()));
        for (count, most, stop) in [(4, 256, Stop::MaxSeqLen), (4, 7, Stop::MaxSeqLen), (2, 5, Stop::MaxNewTokens)] {
            assert!(ends(count, most, stop).unwrap_err().contains("ends the row"));
        }
        assert!(ends(2, 256, Stop::MaxNewTokens).unwrap_err().contains("nothing ends the row"));
    }

    #[test]
    fn a_golden_has_as_many_rows_as_a_run_can_have() {
        let of = |count| {
            let steps = || vec![step(&[(99, 3.25, 0.0)])];
            read(&golden((0..count).map(|_| row(&[1], Stop::Eos, steps())).collect()).to_yaml())
        };
        assert_eq!(of(16).unwrap().rows.len(), 16);
        assert!(of(17).unwrap_err().message.contains("rows: there are 17; a run has at most 16"));
    }

    prop_compose! {
        fn steps()(parts in prop::collection::vec((any::<u32>(), any::<u32>()), 1..6), offset in 0usize..90) -> Step {
            let logits = parts.iter().map(|(bits, _)| f32::from_bits(*bits)).filter(|l| l.is_finite());
            let mut logits: Vec<f32> = logits.collect();
            logits.sort_by(|a, b| b.total_cmp(a));
            let spread = |bits: u32| { let s = f32::from_bits(bits).abs(); if s.is_nan() { 0.5 } else { s } };
            let top: Vec<_> = logits.iter().zip(&parts).enumerate()
                .map(|(i, (&logit, &(_, bits)))| Candidate { id: offset + i, logit, spread: if i == 0 { 0.0 } else { spread(bits) } })
                .collect();
            if top.is_empty() { step(&[(1, 0.0, 0.0)]) } else { Step { top } }
        }
    }

    proptest! {
        #[test]
        fn every_bit_is_read_back(steps in prop::collection::vec(steps(), 1..5), prompt in "\\PC{0,20}|[\\x00-\\x{2fff}]{0,8}", name in "[ -~]{1,12}") {
            let mut golden = golden(vec![row(&[1], Stop::MaxNewTokens, steps)]);
            golden.rows[0].prompt = Some(prompt);
            golden.name = name;
            golden.limits.stop_ids = vec![];
            golden.limits.max_new_tokens = golden.rows[0].steps.len();
            let back = read(&golden.to_yaml()).unwrap();
            prop_assert_eq!(&back, &golden);
            // Equality takes -0 for 0.
            prop_assert_eq!(back.to_yaml(), golden.to_yaml());
        }

        #[test]
        fn garbage_is_an_error_and_never_a_crash(text in "\\PC{0,60}", cut in 0usize..2000) {
            prop_assert!(read(&text).is_err());
            let whole = small().to_yaml();
            let part: String = whole.chars().take(cut.min(whole.chars().count() - 2)).collect();
            prop_assert!(read(&part).is_err());
        }
    }
}
