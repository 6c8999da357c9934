//! Writes a case file: keys in a fixed order, one flow-style row where a row is meant to be read as one.
//! What is written is read back as the same case.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use reference::{Geometry, Policy, Site};

use crate::case::{Case, DeviceInfo, Kernel};
use crate::input::Input;
use crate::launch::{Argument, Launch, ScalarValue};
use crate::policy::PolicyRequest;

impl Case {
    /// The case as the text of a case file (`docs/bundles.md`).
    #[must_use]
    pub fn to_yaml(&self) -> String {
        let mut out = Lines(String::new());
        out.entry("format", 1);
        out.entry("name", scalar(&self.name));
        out.entry("kernel", self.kernel.kind().name());
        match &self.geometry_name {
            Some(name) => out.entry("geometry", name),
            None => out.geometry(&self.geometry),
        }
        out.entry("layers", self.layers);
        out.entry("seed", self.seed);
        out.entry("max_seq", self.max_seq);
        out.entry("pages", self.pages);
        out.entry("rope_theta", number(self.rope_theta));
        out.section("tensors", &self.tensors);
        out.entry("active_batch", self.active_batch);
        match &self.kernel {
            Kernel::DecodeLayer(decode) => {
                out.entry("seq_lens", row(&decode.batch.seq_lens));
                out.rows("block_table", &decode.batch.block_table);
                out.entry("slot_mapping", row(&decode.batch.slots));
            }
            Kernel::Tokens(tokens) => {
                out.rows("prompts", &tokens.prompts);
                out.entry("decode_steps", tokens.decode_steps);
                out.rows("block_table", &tokens.block_table);
            }
        }
        out.entry("padding", self.padding.name());
        if self.policy_in_case {
            out.entry("policy", policy(&self.policy));
        }
        if self.poison.is_some() {
            out.entry("poison", "{kv_beyond_context: nan}");
        }
        if let Some(device) = &self.device {
            out.device(device);
        }
        if !self.inputs_sha256.is_empty() {
            out.section("inputs_sha256", &self.inputs_sha256);
        }
        if !self.final_cache_sha256.is_empty() {
            let hashes = self.final_cache_sha256.iter().map(|(input, hash)| format!("{}: {hash}", input.name()));
            out.entry("final_cache_sha256", format!("{{{}}}", join(hashes)));
        }
        out.0
    }
}

/// Lines of a YAML mapping.
struct Lines(String);

impl Lines {
    // Writing to a string cannot fail, so results are dropped.
    fn entry(&mut self, key: &str, value: impl Display) {
        let _ = writeln!(self.0, "{key}: {value}");
    }

    fn nested(&mut self, key: &str, value: impl Display) {
        let _ = writeln!(self.0, "  {key}: {value}");
    }

    fn heading(&mut self, key: &str) {
        let _ = writeln!(self.0, "{key}:");
    }

    fn section(&mut self, key: &str, entries: &BTreeMap<Input, impl Display>) {
        self.heading(key);
        for (input, value) in entries {
            self.nested(input.name(), value);
        }
    }

    fn rows<T: Display>(&mut self, key: &str, rows: &[Vec<T>]) {
        self.heading(key);
        for values in rows {
            let _ = writeln!(self.0, "  - {}", row(values));
        }
    }

    fn geometry(&mut self, geometry: &Geometry) {
        self.heading("geometry");
        self.nested("hidden_size", geometry.hidden_size);
        self.nested("num_attention_heads", geometry.num_attention_heads);
        self.nested("num_key_value_heads", geometry.num_key_value_heads);
        self.nested("head_dim", geometry.head_dim);
        self.nested("intermediate_size", geometry.intermediate_size);
        self.nested("num_hidden_layers", geometry.num_hidden_layers);
        self.nested("vocab_size", geometry.vocab_size);
        self.nested("real_vocab_size", geometry.real_vocab_size);
        self.nested("rms_norm_eps", number(f64::from(geometry.rms_norm_eps)));
    }

    fn device(&mut self, device: &DeviceInfo) {
        self.heading("device");
        self.nested("kind", device.kind.name());
        if let Some(revision) = &device.kernel_revision {
            self.nested("kernel_revision", scalar(revision));
        }
        if let Some(ulps) = device.exp_ulp {
            self.nested("noise", format!("{{exp_ulp: {ulps}}}"));
        }
        if let Some(launch) = &device.kernel {
            self.launch(launch);
        }
    }

    fn launch(&mut self, launch: &Launch) {
        let arguments = launch.arguments.iter().map(argument);
        let _ = write!(
            self.0,
            "  kernel:\n    binary: {}\n    function: {}\n    blocks: {}\n    arguments:\n",
            scalar(&launch.binary),
            scalar(&launch.function),
            launch.blocks
        );
        for argument in arguments {
            let _ = writeln!(self.0, "      - {argument}");
        }
    }
}

fn argument(argument: &Argument) -> String {
    match argument {
        Argument::Scalar(scalar) => {
            let value = match scalar.value {
                ScalarValue::ActiveBatch => ScalarValue::ACTIVE_BATCH.to_owned(),
                ScalarValue::Bits(bits) => scalar.kind.text(bits),
            };
            format!("{{{}: {value}}}", scalar.kind.name())
        }
        Argument::Workspace { bytes, zero: true } => format!("{{workspace: {bytes}, zero: true}}"),
        Argument::Workspace { bytes, zero: false } => format!("{{workspace: {bytes}}}"),
        named => named.name().unwrap_or_default().to_owned(),
    }
}

fn join(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(", ")
}

fn row<T: Display>(values: &[T]) -> String {
    format!("[{}]", join(values.iter().map(ToString::to_string)))
}

fn policy(request: &PolicyRequest) -> String {
    match request {
        PolicyRequest::Custom(policy) => {
            let production = Policy::production();
            let changed = Site::ALL.into_iter().filter(|&site| policy.at(site) != production.at(site));
            format!("{{{}}}", join(changed.map(|site| format!("{}: {}", site.name(), policy.at(site).name()))))
        }
        named => named.name().to_owned(),
    }
}

/// A number from which every bit is read back. YAML 1.1 wants a point, and a sign in the exponent.
pub(crate) fn number(value: f64) -> String {
    spelled(format!("{value:?}"))
}

/// The same of single precision, with the digits that it needs.
pub(crate) fn single(value: f32) -> String {
    spelled(format!("{value:?}"))
}

fn spelled(text: String) -> String {
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    let point = if mantissa.contains('.') { "" } else { ".0" };
    let sign = if exponent.starts_with('-') { "" } else { "+" };
    format!("{mantissa}{point}e{sign}{exponent}")
}

/// Text as a YAML scalar: plain where no reader could take it for anything else, quoted otherwise.
fn scalar(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '-' | '.');
    let reserved = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let starts_plainly = text.starts_with(|c: char| c.is_ascii_alphabetic()) || is_revision(text);
    if starts_plainly && text.chars().all(plain) && !reserved.contains(&text.to_ascii_lowercase().as_str()) {
        return text.to_owned();
    }
    // Control characters are refused in names, so quotes and backslashes are all there is to escape.
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Whether text that begins with a digit is a hexadecimal revision that no YAML reader takes for a number.
fn is_revision(text: &str) -> bool {
    let exponents = text.bytes().filter(|&digit| digit == b'e').count();
    let letters = text.bytes().filter(u8::is_ascii_lowercase).count();
    // `0b1` and `12e34` are numbers to some reader; a further letter rules that out.
    text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) && letters > exponents + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_have_a_point_and_a_signed_exponent() {
        for (value, text) in
            [(1e6, "1000000.0"), (1e-6, "1.0e-6"), (1e20, "1.0e+20"), (3.125e-4, "0.0003125"), (-0.0, "-0.0")]
        {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn revisions_are_plain_unless_they_look_like_numbers() {
        for (text, written) in
            [("5b8ce4d6", "5b8ce4d6"), ("12345678", "\"12345678\""), ("12e34", "\"12e34\""), ("0b11", "\"0b11\"")]
        {
            assert_eq!(scalar(text), written);
        }
    }

    proptest! {
        #[test]
        fn scalars_are_read_back(text in "[ -~àß]{1,20}") {
            prop_assert_eq!(serde_yaml::from_str::<String>(&scalar(&text)).unwrap(), text);
        }

        #[test]
        fn numbers_are_read_back(bits in any::<u64>()) {
            let value = f64::from_bits(bits);
            prop_assume!(value.is_finite());
            prop_assert_eq!(serde_yaml::from_str::<f64>(&number(value)).unwrap().to_bits(), bits);
        }
    }
}
