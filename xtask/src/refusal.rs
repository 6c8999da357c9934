//! Why a request was refused: everything that ends with exit code 2.

use std::io;
use std::path::PathBuf;

use cases::CaseError;
use miette::{Diagnostic, GraphicalReportHandler, GraphicalTheme, LabeledSpan, NamedSource, SourceCode};
use thiserror::Error;

use crate::report::text::plain;

/// A request or an input that is wrong.
#[derive(Debug, Error)]
pub enum Refusal {
    /// A case, suite or policy file is wrong.
    #[error(transparent)]
    Case(#[from] CaseError),
    /// A capture is malformed.
    #[error(transparent)]
    Captures(#[from] device::CaptureError),
    /// Nothing to judge under a path.
    #[error(transparent)]
    Discover(#[from] cases::DiscoverError),
    /// A case's inputs are not what its file says.
    #[error(transparent)]
    Inputs(Box<cases::InputError>),
    /// A request that no case can be judged by.
    #[error("{}: {error}", case.display())]
    Judge {
        /// The case file.
        case: PathBuf,
        /// Why.
        error: Box<goldens::JudgeError>,
    },
    /// The parameters of a new case contradict one another.
    #[error(transparent)]
    NewCase(#[from] cases::NewCaseError),
    /// A checkpoint is wrong.
    #[error(transparent)]
    Checkpoint(#[from] cases::CheckpointError),
    /// A step of a model cannot be computed.
    #[error(transparent)]
    Model(#[from] reference::model::ModelError),
    /// A run of a model cannot begin or go on.
    #[error(transparent)]
    Generate(#[from] reference::generate::GenerateError),
    /// The file of an unfinished run is wrong.
    #[error(transparent)]
    RunState(#[from] goldens::run_state::RunStateError),
    /// Text and token ids cannot be turned into one another.
    #[error(transparent)]
    Tokenizer(#[from] cases::TokenizerError),
    /// A golden, or the directory of goldens, is wrong.
    #[error(transparent)]
    Goldens(#[from] goldens::tokens::StoreError),
    /// A dump of tensors cannot be read.
    #[error(transparent)]
    Arrays(#[from] device::dump::DumpError),
    /// A dump of tokens is malformed.
    #[error(transparent)]
    Dump(#[from] goldens::tokens::DumpError),
    /// A directory of dumps cannot be read, or is not clear.
    #[error(transparent)]
    Dumps(#[from] goldens::tokens::DumpsError),
    /// Reports of shards do not belong together.
    #[error(transparent)]
    Merge(#[from] goldens::merge::MergeError),
    /// A synthetic checkpoint cannot be written.
    #[error(transparent)]
    Synthesis(#[from] cases::checkpoint::SynthesisError),
    /// A checkpoint cannot be quantized.
    #[error(transparent)]
    Quantize(#[from] cases::checkpoint::QuantizeError),
    /// An output cannot be written.
    #[error("{}: cannot be written: {error}", path.display())]
    Write {
        /// Where to.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// Anything else that the request asks for and that is not there.
    #[error("{0}")]
    Request(String),
}

impl From<cases::InputError> for Refusal {
    fn from(error: cases::InputError) -> Self {
        Self::Inputs(Box::new(error))
    }
}

impl From<device::BundleError> for Refusal {
    fn from(error: device::BundleError) -> Self {
        match error {
            device::BundleError::Case(error) => Self::Case(error),
            device::BundleError::Captures(error) => Self::Captures(error),
        }
    }
}

/// Bytes of the longest line that is drawn; miette cannot align a label beyond 65,535 columns, and nobody reads there.
const DRAWN: usize = 1000;
/// Characters of a message that a person gets to see.
const SAID: usize = 2000;

impl Refusal {
    /// The refusal as a person reads it: an error in a file with the lines around it.
    pub fn human(&self) -> String {
        if let Self::Case(error) = self
            && let Some(span) = error.span()
            && error.source_text().lines().all(|line| line.len() <= DRAWN)
        {
            let text = NamedSource::new(error.path().display().to_string(), printable(error.source_text()));
            let report = InFile { error, text, span: LabeledSpan::underline(span) };
            let mut out = String::new();
            let handler =
                GraphicalReportHandler::new_themed(GraphicalTheme::unicode()).with_links(false).with_width(120);
            if handler.without_syntax_highlighting().render_report(&mut out, &report).is_ok() {
                return out;
            }
        }
        let text = plain(&self.to_string()).into_owned();
        let clipped: String = text.chars().take(SAID).collect();
        let more = if clipped.len() < text.len() { " ..." } else { "" };
        format!("error: {clipped}{more}\n")
    }
}

/// An error in a file, in the shape that miette draws.
#[derive(Debug, Error)]
#[error("{}", plain(error.message()))]
struct InFile<'a> {
    error: &'a CaseError,
    text: NamedSource<String>,
    span: LabeledSpan,
}

impl Diagnostic for InFile<'_> {
    fn help<'a>(&'a self) -> Option<Box<dyn std::fmt::Display + 'a>> {
        self.error.help().map(|help| Box::new(plain(help)) as _)
    }

    fn source_code(&self) -> Option<&dyn SourceCode> {
        Some(&self.text)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        Some(Box::new(std::iter::once(self.span.clone())))
    }
}

/// The text without control characters, every byte in its place so that spans still fit.
fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() && !matches!(character, '\n' | '\r' | '\t') {
            out.extend(std::iter::repeat_n('?', character.len_utf8()));
        } else {
            out.push(character);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_too_long_to_draw_is_told_in_words() {
        let text = format!("format: 1\nname: x\nseq_lens: [{}x, 1]\n", " ".repeat(70_000));
        let refusal = Refusal::from(cases::Case::parse(&text, "case.yaml".as_ref()).unwrap_err());
        let told = refusal.human();
        assert!(told.starts_with("error: case.yaml:") && told.len() < 3000, "{told}");
    }

    #[test]
    fn control_characters_keep_their_width() {
        let text = "a\u{1b}[2J\u{85}b\n\tc";
        assert_eq!(printable(text), "a?[2J??b\n\tc");
        assert_eq!(printable(text).len(), text.len());
    }
}
