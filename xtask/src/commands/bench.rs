//! `assay bench`: the reference's speed against this machine's own limits (`docs/performance.md`).

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use goldens::Progress as _;

use crate::bench::layer::{Shape, as_checkpoint, down_codes};
use crate::bench::lines::{LINES, Runner, Subject, layers_14b};
use crate::bench::peer::{self, Comparison, PeerError, TORCH};
use crate::bench::{Report, lines};
use crate::exit_codes::Code;
use crate::output;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report;

/// The request.
#[derive(Args)]
pub struct Bench {
    /// Run this line only; may be given several times. Naming a line of a peer (`peer_torch_*`) asks for that peer
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
    /// A checkpoint of the 14B geometry; adds the line that runs a whole decode step of it
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Also run somebody else's golden of the same layer, in turn with ours
    #[arg(long, value_enum, value_name = "PEER")]
    peer: Option<Peer>,
    /// The Python interpreter that runs the peer
    #[arg(long, value_name = "PATH", env = "PYTHON", default_value = "python3")]
    python: PathBuf,
    /// Seconds that the peer has for each answer before it is taken for hung
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    peer_timeout: u64,
    /// Format of the report on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
}

/// Peers there are.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Peer {
    /// A PyTorch golden on the CPU, in three forms
    Torch,
}

/// Report formats of standard output.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A table for a person
    Human,
    /// One JSON object
    Json,
}

/// Which lines a run has.
#[derive(Debug, PartialEq, Eq)]
struct Selection {
    lines: Vec<(&'static str, Subject)>,
    /// Lines and forms of the peer.
    peer: Vec<(&'static str, &'static str)>,
}

impl Bench {
    /// Measures and reports.
    ///
    /// # Errors
    /// A line that does not exist, a checkpoint that is wrong, or inputs that this machine cannot hold.
    pub fn run(&self) -> Result<Code, Refusal> {
        let selection = Selection::new(&self.only, self.peer.is_some(), self.model.is_some())?;
        if !selection.peer.is_empty() {
            peer::require(&self.python).map_err(|error| Refusal::Request(error.to_string()))?;
        }
        let bar = Bar::new(selection.lines.len() + usize::from(!selection.peer.is_empty()));
        bar.begin("floors");
        let mut runner = Runner::new(self.model.as_deref())?;
        let mut lines = Vec::new();
        for &(name, subject) in &selection.lines {
            bar.begin(name);
            lines.push(runner.run(name, subject)?);
            bar.done();
        }
        let mut report = Report { floors: runner.finish(), lines, notes: Vec::new() };
        let mut code = Code::Pass;
        if !selection.peer.is_empty() {
            let found = self.compare(&selection.peer, &bar)?;
            code = merge(&mut report, found);
        }
        drop(bar);
        match self.format {
            Format::Human => output::stdout(&report::bench::human(&report))?,
            Format::Json => {
                report.notes.iter().for_each(|note| output::stderr(&format!("{note}\n")));
                output::stdout(&report::bench::json(&report))?;
            }
        }
        Ok(code)
    }

    /// Runs the peer in turn with the layer whose weights lie as its own do.
    fn compare(&self, forms: &[(&str, &str)], bar: &Bar) -> Result<Result<Comparison, PeerError>, Refusal> {
        bar.begin("peer");
        let inputs = layers_14b().inputs(Shape { rows: reference::BATCH, context: 200 })?;
        let down = down_codes(inputs.geometry())?;
        let layer = as_checkpoint(inputs.layer(0)?, down.view());
        let layer = layer.map_err(|error| Refusal::Request(format!("peer: {error}")))?;
        Ok(peer::compare(
            &self.python,
            Duration::from_secs(self.peer_timeout),
            &layer,
            forms,
            lines::PEERS_LAYER,
            |form| bar.begin(form),
        ))
    }
}

/// Adds what came of the peer to the report. A missing peer spoils nothing unless it was all that was asked for; one
/// that computes other integers is a failure.
fn merge(report: &mut Report, found: Result<Comparison, PeerError>) -> Code {
    match found {
        Ok(comparison) => {
            report.lines.extend(comparison.lines);
            report.notes.extend(comparison.notes);
            if comparison.equal { Code::Pass } else { Code::Failure }
        }
        Err(error) => {
            let absent = matches!(error, PeerError::Absent { .. });
            report.notes.push(format!("peer skipped: {error}"));
            if absent && !report.lines.is_empty() { Code::Pass } else { Code::Unjudged }
        }
    }
}

impl Selection {
    /// The lines that a request names; all when it names none, those of a model where there is one. The peer's lines
    /// run when it is asked for, those that are named or else all, and naming one asks for it.
    fn new(only: &[String], peer: bool, model: bool) -> Result<Self, Refusal> {
        let names = || LINES.iter().map(|(name, _)| *name).chain(TORCH.iter().map(|(name, _)| *name));
        if let Some(unknown) = only.iter().find(|asked| !names().any(|name| name == asked.as_str())) {
            let names = names().collect::<Vec<_>>().join(", ");
            return Err(Refusal::Request(format!("--only: no line is called `{unknown}`; there are {names}")));
        }
        let asked = |name: &str| only.iter().any(|asked| asked == name);
        let lines: Vec<_> = LINES.iter().filter(|(name, _)| only.is_empty() || asked(name)).copied().collect();
        let modelless = |(_, subject): &(&str, Subject)| !model && needs_model(*subject);
        if let Some((name, _)) = lines.iter().filter(|_| !only.is_empty()).find(|line| modelless(line)) {
            return Err(Refusal::Request(format!(
                "--only {name}: runs on a checkpoint; name its directory with --model DIR \
                 (`assay model synthesize DIR --geometry 14b` makes one)"
            )));
        }
        let lines = lines.into_iter().filter(|line| !modelless(line)).collect();
        let named: Vec<_> = TORCH.iter().filter(|(name, _)| asked(name)).copied().collect();
        let peer = if named.is_empty() && peer { TORCH.to_vec() } else { named };
        Ok(Self { lines, peer })
    }
}

/// Whether a line runs on a checkpoint.
fn needs_model(subject: Subject) -> bool {
    matches!(subject, Subject::Model(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Floors, Line};

    fn select(only: &[&str], peer: bool) -> Result<(Vec<&'static str>, Vec<&'static str>), String> {
        select_with(only, peer, false)
    }

    fn select_with(only: &[&str], peer: bool, model: bool) -> Result<(Vec<&'static str>, Vec<&'static str>), String> {
        let only: Vec<String> = only.iter().map(|&name| name.into()).collect();
        let selection = Selection::new(&only, peer, model).map_err(|refusal| refusal.to_string())?;
        let names = selection.lines.iter().map(|(name, _)| *name).collect();
        Ok((names, selection.peer.iter().map(|(name, _)| *name).collect()))
    }

    #[test]
    fn lines_are_selected_by_name() {
        let (all, none) = select(&[], false).unwrap();
        assert_eq!((all.len(), none.len()), (LINES.len() - 1, 0));
        assert_eq!(select(&["inputs_14b"], false).unwrap(), (vec!["inputs_14b"], vec![]));
        // The order is that of the table, and twice is once.
        let asked = ["compare_bf16", "layer_14b_rows1_ctx1000", "compare_bf16"];
        assert_eq!(select(&asked, false).unwrap().0, ["layer_14b_rows1_ctx1000", "compare_bf16"]);
        assert_eq!(select(&["peer_torch_int_mm"], false).unwrap(), (vec![], vec!["peer_torch_int_mm"]));
        assert_eq!(select(&["inputs_14b"], true).unwrap().1.len(), TORCH.len());
        let refused = select(&["inputs_14b", "layer_15b"], true).unwrap_err();
        assert!(refused.contains("`layer_15b`") && refused.contains("layer_14b_rows16_ctx200_in_out"), "{refused}");
        assert!(refused.contains("peer_torch_converted"), "{refused}");
    }

    #[test]
    fn a_models_line_runs_where_there_is_a_model() {
        let line = "model_14b_rows1";
        assert!(!select_with(&[], false, false).unwrap().0.contains(&line));
        assert!(select_with(&[], false, true).unwrap().0.contains(&line));
        assert_eq!(select_with(&[line], false, true).unwrap().0, [line]);
        assert_eq!(select_with(&["inputs_14b"], false, true).unwrap().0, ["inputs_14b"]);
        let refused = select_with(&["inputs_14b", line], false, false).unwrap_err();
        assert!(refused.contains(line) && refused.contains("--model DIR"), "{refused}");
    }

    #[test]
    fn names_are_unique_and_the_peers_layer_is_one_of_them() {
        let mut names: Vec<_> = LINES.iter().map(|(name, _)| *name).collect();
        assert!(names.contains(&lines::PEERS_LAYER));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), LINES.len());
    }

    #[test]
    fn a_missing_peer_only_matters_when_nothing_else_ran() {
        let report = |lines: usize| Report {
            floors: Floors::default(),
            lines: vec![Line::new("x", &[1.0], "read".into(), 1.0); lines],
            notes: vec![],
        };
        let absent = || PeerError::Absent { what: "no python3".into(), install: "pip install torch".into() };
        let mut with_others = report(1);
        assert_eq!(merge(&mut with_others, Err(absent())), Code::Pass);
        assert!(with_others.notes[0].contains("pip install torch"), "{:?}", with_others.notes);
        assert_eq!(merge(&mut report(0), Err(absent())), Code::Unjudged);
        assert_eq!(merge(&mut report(1), Err(PeerError::Failed("killed".into()))), Code::Unjudged);
        let compared = |equal| Comparison { lines: report(1).lines, notes: vec![], equal };
        assert_eq!(merge(&mut report(1), Ok(compared(true))), Code::Pass);
        let mut differing = report(1);
        assert_eq!(merge(&mut differing, Ok(compared(false))), Code::Failure);
        assert_eq!(differing.lines.len(), 2);
    }
}
