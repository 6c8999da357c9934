//! `assay tokens generate`: what the reference generates from some prompts, with the margin of every choice.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use goldens::run_state::{self, Request};
use reference::generate::{Decoder, Sequence, Stop};
use reference::model::Weights;
use reference::{BATCH, Batch, Policy, Site};
use serde::Serialize;

use super::prompts::{Opened, Prompts};
use super::show::{Format, json, table};
use crate::bench::floors::Gauge;
use crate::bench::work::Work;
use crate::exit_codes::Code;
use crate::output;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report::text::{plain, plural};

/// How long a run goes on before it is kept again in the file of `--resume`.
const KEEP_EVERY: Duration = Duration::from_secs(10);
/// Steps of the smallest margins that a person gets to see.
const CLOSEST: usize = 5;

/// Generate tokens greedily, as the kernels' contract computes them.
#[derive(Args)]
pub struct Generate {
    #[command(flatten)]
    prompts: Prompts,
    /// Keep the run in this file every few seconds, and go on from it when it is there; it is removed at the end
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Also report seconds per token, and their ratio to reading the weights once
    #[arg(long)]
    timing: bool,
    /// Format on standard output
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
}

/// What a run gave.
#[derive(Serialize)]
struct Answer {
    rows: Vec<Row>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<Timing>,
}

/// One prompt's tokens.
#[derive(Serialize)]
struct Row {
    prompt_ids: Vec<usize>,
    token_ids: Vec<usize>,
    /// By how much each choice's logit exceeds the next; an infinite one is a string.
    margins: Vec<serde_json::Value>,
    /// Null where there is no tokenizer.
    text: Option<String>,
    stop: &'static str,
    /// Of each token; null for those of an earlier call.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<Vec<Option<f64>>>,
}

/// How long the tokens took.
#[derive(Serialize)]
struct Timing {
    /// All chunks of the prompts, up to the first tokens.
    prefill_seconds: f64,
    /// Median of the decode steps; null where there was none.
    seconds_per_step: Option<f64>,
    /// Streaming read bandwidth, measured after the run.
    read_gb_s: f64,
    /// Reading the weights and the keys and values of the last step once at that bandwidth.
    floor_seconds: f64,
    /// Median over that floor.
    ratio: Option<f64>,
}

impl Generate {
    /// Runs the command.
    ///
    /// # Errors
    /// What is wrong with the request, the checkpoint or the file of an unfinished run.
    pub fn run(&self) -> Result<Code, Refusal> {
        let opened = self.prompts.open()?;
        let weights = opened.source.weights()?;
        let weights: &dyn Weights = &*weights;
        let rope = opened.source.rope(opened.positions())?;
        if let Some(remark) = opened.beyond_trained() {
            output::stderr(&remark);
        }
        let (prompts, limits) = (opened.prompts.clone(), opened.limits.clone());
        let mut decoder = Decoder::new(&weights, rope, prompts, limits, opened.policy.clone())?;
        let request = self.resume.as_ref().map(|_| request(&opened)).transpose()?;
        if let (Some(path), Some(request)) = (&self.resume, &request) {
            run_state::load(path, request, &mut decoder)?;
            // Whether it can be kept at all is known before any work.
            run_state::save(path, request, &decoder)?;
        }
        let steps = self.advance(&mut decoder, &opened, request.as_ref())?;
        if let Some(path) = &self.resume
            && let Err(error) = std::fs::remove_file(path)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            output::stderr(&format!("{}: the run is done, and its file cannot be removed: {error}\n", path.display()));
        }
        let timing = if self.timing { Some(timing(&weights, &decoder, &steps)?) } else { None };
        let rows = decoder.sequences().iter().map(|sequence| row(sequence, &opened, self.timing.then_some(&steps)));
        let answer = Answer { rows: rows.collect::<Result<_, _>>()?, timing };
        match self.format {
            Format::Json => json(&answer)?,
            Format::Human => output::stdout(&human(&answer))?,
        }
        Ok(Code::Pass)
    }

    /// Runs to the end. Gives each advance's seconds with the most tokens that a row had after it.
    fn advance(
        &self,
        decoder: &mut Decoder<'_, impl Weights>,
        opened: &Opened,
        request: Option<&Request>,
    ) -> Result<Vec<(usize, f64)>, Refusal> {
        let longest = opened.prompts.iter().map(Vec::len).max().unwrap_or(0);
        let bar = Bar::of_tokens(longest + opened.limits.max_new_tokens);
        let (mut steps, mut kept) = (Vec::new(), Instant::now());
        let most = |rows: &[Sequence]| rows.iter().map(|row| row.choices.len()).max().unwrap_or(0);
        let mut generated = most(decoder.sequences());
        loop {
            bar.reached((decoder.prefilled().min(longest) + generated) as u64);
            let start = Instant::now();
            if !decoder.advance()? {
                return Ok(steps);
            }
            generated = most(decoder.sequences());
            steps.push((generated, start.elapsed().as_secs_f64()));
            if let (Some(path), Some(request)) = (&self.resume, request)
                && kept.elapsed() >= KEEP_EVERY
            {
                run_state::save(path, request, decoder)?;
                kept = Instant::now();
            }
        }
    }
}

/// Everything that decides what the run gives.
fn request(opened: &Opened) -> Result<Request, Refusal> {
    Ok(Request {
        model: opened.source.fingerprint()?,
        prompts: opened.prompts.clone(),
        max_new_tokens: opened.limits.max_new_tokens,
        max_seq_len: opened.limits.max_seq_len,
        stop_ids: opened.limits.stop_ids.clone(),
        policy: rules(&opened.policy),
    })
}

/// The rule at every site, by name.
fn rules(policy: &Policy) -> BTreeMap<String, String> {
    Site::ALL.into_iter().map(|site| (site.name().to_owned(), policy.at(site).name().to_owned())).collect()
}

fn row(sequence: &Sequence, opened: &Opened, steps: Option<&Vec<(usize, f64)>>) -> Result<Row, Refusal> {
    let token_ids = sequence.tokens();
    let text = opened.tokenizer.as_ref().map(|tokenizer| tokenizer.decode(&token_ids)).transpose()?;
    let margin = |margin: f32| if margin.is_finite() { margin.into() } else { "Infinity".into() };
    let seconds = |index: usize| {
        let of_step = steps?.iter().filter(|(tokens, _)| *tokens == index + 1).map(|(_, seconds)| seconds);
        of_step.copied().reduce(|sum, seconds| sum + seconds)
    };
    Ok(Row {
        prompt_ids: sequence.prompt.clone(),
        margins: sequence.choices.iter().map(|choice| margin(choice.margin())).collect(),
        text,
        stop: match sequence.stop {
            Some(Stop::StopId(_)) => "eos",
            Some(Stop::MaxSeqLen) => "max_seq_len",
            _ => "max_new_tokens",
        },
        seconds: steps.map(|_| (0..token_ids.len()).map(seconds).collect()),
        token_ids,
    })
}

fn timing<W: Weights>(weights: &W, decoder: &Decoder<'_, W>, steps: &[(usize, f64)]) -> Result<Timing, Refusal> {
    let prefill = steps.iter().filter(|(tokens, _)| *tokens <= 1).map(|(_, seconds)| seconds).sum();
    let mut decode: Vec<f64> = steps.iter().filter(|(tokens, _)| *tokens > 1).map(|(_, seconds)| *seconds).collect();
    decode.sort_by(f64::total_cmp);
    let median = decode.get(decode.len() / 2).copied();
    let rows = decoder.sequences();
    // The last step of all rows together: only the lengths of its contexts count here.
    let mut last = Batch { active: rows.len(), seq_lens: [1; BATCH], block_table: Vec::new(), slots: [0; BATCH] };
    for (context, row) in last.seq_lens.iter_mut().zip(rows) {
        *context = row.prompt.len() + row.choices.len().saturating_sub(1);
    }
    let floors = Gauge::new()?.best();
    let (_, floor_seconds) = Work::step(weights, &last)?.floor(&floors);
    Ok(Timing {
        prefill_seconds: prefill,
        seconds_per_step: median,
        read_gb_s: floors.read_gb_s,
        floor_seconds,
        ratio: median.map(|median| median / floor_seconds),
    })
}

fn human(answer: &Answer) -> String {
    let mut out = String::new();
    for (index, row) in answer.rows.iter().enumerate() {
        if index > 0 {
            out.push('\n');
        }
        let ids = |ids: &[usize]| ids.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
        // Writing to a string cannot fail.
        let _ = writeln!(out, "row {index}   {}, then {}", prompt(row), plural(row.token_ids.len() as u64, "token"));
        let _ = writeln!(out, "prompt  {}", ids(&row.prompt_ids));
        let _ = writeln!(out, "tokens  {}", ids(&row.token_ids));
        if let Some(text) = &row.text {
            let _ = writeln!(out, "text    {}", plain(text));
        }
        let _ = writeln!(out, "ended   at {}", row.stop);
        let mut closest: Vec<(usize, f64)> =
            row.margins.iter().enumerate().filter_map(|(step, margin)| Some((step, margin.as_f64()?))).collect();
        closest.sort_by(|a, b| a.1.total_cmp(&b.1));
        closest.truncate(CLOSEST);
        out.push_str("smallest margins\n");
        let rows = closest
            .iter()
            .map(|(step, margin)| [step.to_string(), row.token_ids[*step].to_string(), format!("{margin:.6}")]);
        table(&mut out, ["step", "token", "margin"], rows);
    }
    if let Some(timing) = &answer.timing {
        let _ = writeln!(out, "\nprefill {:.3} s", timing.prefill_seconds);
        if let (Some(step), Some(ratio)) = (timing.seconds_per_step, timing.ratio) {
            let _ = writeln!(
                out,
                "step    {step:.4} s, {ratio:.2} times reading weights and cache once ({:.4} s at {:.1} GB/s)",
                timing.floor_seconds, timing.read_gb_s
            );
        }
    }
    out
}

fn prompt(row: &Row) -> String {
    plural(row.prompt_ids.len() as u64, "prompt token")
}
