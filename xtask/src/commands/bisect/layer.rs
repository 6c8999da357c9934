//! `assay bisect layer`: the first layer and step of a token run at which drift is made. What that means is in
//! `goldens::layerwise`; this reads the states, or fetches them, and shows what came back.

mod fetch;

use std::path::PathBuf;
use std::time::Duration;

use cases::{InputStore, Inputs, PolicyRequest};
use clap::Args;
use device::{Bundle, LayerStates, Moment, StateSizes};
use goldens::layerwise::{BisectError, Fetch, LayerReport, LayerRequest, Outcome, bisect_layer};
use goldens::{FALSE_ALARM, Job};
use serde::Serialize;

use crate::commands::show::{Format, json};
use crate::exit_codes::Code;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::{place, plain};
use crate::{output, report};
use fetch::Fetcher;

/// Find the first layer and step of a token run at which drift is made.
#[derive(Args)]
pub struct Layer {
    /// A bundle of kernel `tokens`, or its case file
    #[arg(value_name = "BUNDLE")]
    bundle: PathBuf,
    /// States after layers: a safetensors file, or a directory of them (docs/bundles.md, Layer states)
    #[arg(long, value_name = "FILE-OR-DIR")]
    states: Option<PathBuf>,
    /// Fetch states one at a time with this shell command, in which {layer}, {step} and {out} are filled in; {step} is a
    /// decode step from 0, or `prefill`, and {out} the safetensors file to write
    #[arg(long, value_name = "COMMAND", value_parser = fetch::template)]
    fetch: Option<String>,
    /// With --fetch, the step that is known to be bad (a decode step from 0, or `prefill`); without it, where drift is
    /// seen already, else the last one
    #[arg(long, value_name = "STEP", requires = "fetch")]
    step: Option<Moment>,
    /// Seconds that one fetch may take
    #[arg(long, value_name = "SECONDS", default_value_t = 600, requires = "fetch", value_parser = clap::value_parser!(u64).range(1..=604_800))]
    timeout: u64,
    /// Keep what was fetched, and what the command said, in this directory, and fetch nothing again that is there
    #[arg(long, value_name = "DIR", requires = "fetch")]
    keep: Option<PathBuf>,
    /// Rounding rules the device is held to: auto, production, rne, or a YAML file {site: rule};
    /// default: what the case says, else auto
    #[arg(long, value_name = "POLICY")]
    policy: Option<String>,
    /// Probability that a right device is accused all the same
    #[arg(long, value_name = "P", default_value_t = FALSE_ALARM, value_parser = crate::commands::gate::probability)]
    false_alarm: f64,
    /// Format on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
}

/// The answer as JSON.
#[derive(Serialize)]
struct Answer<'a> {
    path: String,
    #[serde(flatten)]
    report: &'a LayerReport,
}

/// A search that could not go on, as JSON.
#[derive(Serialize)]
struct Unjudged {
    path: String,
    outcome: Outcome,
    message: String,
}

impl Layer {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request.
    pub fn run(&self) -> Result<Code, Refusal> {
        let policy = self.policy.as_deref().map(PolicyRequest::from_flag).transpose()?;
        let bundle = Bundle::open(&self.bundle)?;
        let sizes = StateSizes::of(&bundle.case).ok_or_else(|| {
            let path = bundle.case.path.display();
            Refusal::Request(format!("{path}: is no case of kernel tokens; layers are told apart in token runs"))
        })?;
        if let Some(Moment::Step(step)) = self.step.filter(|step| *step >= Moment::Step(sizes.decode_steps)) {
            let steps = sizes.decode_steps;
            return Err(Refusal::Request(format!("--step {step}: the run has {steps} decode steps, counted from 0")));
        }
        let states = match &self.states {
            Some(path) => LayerStates::open(path, &sizes)?,
            None => LayerStates::default(),
        };
        let mut fetcher = match &self.fetch {
            Some(command) => {
                let limit = Duration::from_secs(self.timeout);
                Some(Fetcher::new(command, limit, sizes, self.keep.as_deref(), &bundle)?)
            }
            None => None,
        };
        let inputs = Inputs::generate(&bundle.case, &InputStore::new())?;
        let policy = policy.as_ref().unwrap_or(&bundle.case.policy);
        let job = Job { false_alarm: self.false_alarm, ..Job::new(&bundle, &inputs, policy) };
        let request = LayerRequest { job, states: &states, bad: self.step };
        let found = {
            let bar = Bar::new(1);
            bisect_layer(&request, fetcher.as_mut().map(|fetcher| fetcher as &mut dyn Fetch), &bar)
        };
        let path = place(&bundle.case.path);
        match found {
            Ok(found) => {
                let code = code(found.outcome);
                match self.format {
                    Format::Json => json(&Answer { path, report: &found })?,
                    Format::Human => output::stdout(&report::layers::render(&found, &path, code))?,
                }
                Ok(code)
            }
            // What the device does not give cannot be judged.
            Err(error @ BisectError::Fetch { .. }) => {
                let message = error.to_string();
                output::stderr(&format!("error: {}\n", plain(&message)));
                if self.format == Format::Json {
                    json(&Unjudged { path, outcome: Outcome::Unjudged, message })?;
                }
                Ok(Code::Unjudged)
            }
            Err(error) => Err(Refusal::Request(error.to_string())),
        }
    }
}

/// What the process ends with.
fn code(outcome: Outcome) -> Code {
    match outcome {
        Outcome::Located | Outcome::NoDrift => Code::Pass,
        Outcome::EndIsRight => Code::Failure,
        Outcome::Lost | Outcome::Unjudged => Code::Unjudged,
    }
}
