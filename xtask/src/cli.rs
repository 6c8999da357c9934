//! The command line as a whole: parsing, and what a wrong request looks like in each format.

use std::ffi::OsString;
use std::num::NonZeroUsize;

use clap::{Arg, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::commands::{
    bench, bisect, case, diff, doctor, export, gate, import, inspect, model, power, report as reports, tokens,
};
use crate::exit_codes::Code;
use crate::refusal::Refusal;
use crate::{output, report};

/// Tells whether an NPU kernel computes what it should.
#[derive(Parser)]
#[command(name = "assay", version, about, max_term_width = 120, after_help = EXIT_CODES)]
struct Cli {
    /// Run on these kernels instead of the fastest (`assay doctor` lists them); results never depend on it
    #[arg(long, global = true, value_name = "LEVEL", env = "ASSAY_KERNELS")]
    kernels: Option<String>,
    #[command(subcommand)]
    command: Command,
}

impl Cli {
    fn run(self) -> Result<Code, Refusal> {
        check_threads(std::env::var("RAYON_NUM_THREADS").ok().as_deref())?;
        if let Some(level) = &self.kernels {
            reference::kernels::choose(level)
                .map_err(|error| Refusal::Request(format!("{error}; asked for by --kernels or ASSAY_KERNELS")))?;
        }
        let threads = match &self.command {
            Command::Gate(gate) => gate.threads(),
            _ => None,
        };
        start_threads(threads)?;
        match self.command {
            Command::Gate(gate) => gate.run(),
            Command::Bisect(bisect) => bisect.run(),
            Command::Case(case) => case.run(),
            Command::Model(model) => model.run(),
            Command::Power(power) => power.run(),
            Command::Tokens(tokens) => tokens.run(),
            Command::Inspect(inspect) => inspect.run(),
            Command::Diff(diff) => diff.run(),
            Command::Export(export) => export.run(),
            Command::Import(import) => import.run(),
            Command::Doctor => doctor::run(),
            Command::Bench(bench) => bench.run(),
            Command::Report(report) => report.run(),
        }
    }
}

/// Most threads of a run, however they are asked for.
pub const MOST_THREADS: usize = 1024;

const EXIT_CODES: &str = "Exit codes: 0 every case passed; 1 an accuracy or contract failure was found; \
    2 the request or an input is wrong, nothing was judged; 125 could not be judged";

#[derive(Subcommand)]
enum Command {
    /// Judge captured kernel outputs against the contract
    Gate(Box<gate::Gate>),
    /// Find where drift was made, and why
    #[command(subcommand)]
    Bisect(bisect::Command),
    /// List, show and make cases
    #[command(subcommand)]
    Case(case::Command),
    /// Try the gate itself: plant every known fault, and count what is caught, located and named
    Power(Box<power::Power>),
    /// Show checkpoints, quantize them, and make synthetic ones
    #[command(subcommand)]
    Model(model::Command),
    /// Generate token sequences from a checkpoint, and judge a device's against them
    #[command(subcommand)]
    Tokens(tokens::Command),
    /// Show the tensors of dumps: .pt, .npy, .npz, .safetensors, argument dumps, directories of them
    Inspect(inspect::Inspect),
    /// Compare two dumps tensor by tensor and bit by bit
    Diff(diff::Diff),
    /// Write a case's inputs and outputs in the files of other tools, a golden-data directory among them
    Export(export::Export),
    /// Make a dump of other tools a bundle, each entry with the evidence for what it is
    Import(import::Import),
    /// Show what this program found on this machine
    Doctor,
    /// Measure the reference's speed against this machine's own limits
    Bench(bench::Bench),
    /// Work with reports that were written before
    #[command(subcommand)]
    Report(reports::Command),
}

/// Runs the command that the arguments ask for. `args[0]` is the program's name.
pub fn run(args: Vec<OsString>) -> Code {
    let json = asks_for_json(&args);
    let command = without_empty_variables(Cli::command());
    let parsed = command.try_get_matches_from(args).and_then(|matches| Cli::from_arg_matches(&matches));
    let result = match parsed {
        Ok(cli) => cli.run(),
        // Help and version are answers.
        Err(answer) if !answer.use_stderr() => output::stdout(&answer.render().ansi().to_string()).map(|()| Code::Pass),
        Err(usage) => {
            output::stderr(&usage.render().ansi().to_string());
            if json { refuse_in_json(usage.render().to_string().trim_start_matches("error: ")) } else { Ok(()) }
                .map(|()| Code::Refused)
        }
    };
    result.unwrap_or_else(|refusal| {
        output::stderr(&refusal.human());
        // Standard output may be what failed; the exit code still says it.
        if json {
            let _ = refuse_in_json(&refusal.to_string());
        }
        Code::Refused
    })
}

/// The command without those of its environment variables that are set and empty, as shells and CI files clear them:
/// they mean what unset ones mean.
fn without_empty_variables(command: clap::Command) -> clap::Command {
    let empty = |arg: &Arg| arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
    command
        .mut_args(|arg| if empty(&arg) { arg.env(None::<&str>) } else { arg })
        .mut_subcommands(without_empty_variables)
}

/// Starts the threads that all commands share, as many as asked for or else as the pool's variable or the machine
/// has. Started when they are first used, a system that gives none would end the program in the middle of its work.
fn start_threads(threads: Option<NonZeroUsize>) -> Result<(), Refusal> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.map_or(0, NonZeroUsize::get));
    let asked = threads.map_or_else(|| "threads".to_owned(), |threads| format!("--threads {threads}"));
    pool.build_global().map_err(|error| Refusal::Request(format!("{asked}: cannot be started: {error}")))
}

/// Refuses more threads than [`MOST_THREADS`] where the pool would take them from its variable, and what it would pass over
/// because it is no number.
fn check_threads(requested: Option<&str>) -> Result<(), Refusal> {
    let Some(threads) = requested.filter(|threads| !threads.is_empty()) else { return Ok(()) };
    let reason = match threads.parse::<usize>() {
        Ok(0..=MOST_THREADS) => return Ok(()),
        Ok(_) => format!("at most {MOST_THREADS} threads are started; set fewer, or unset it for one a core"),
        Err(_) => format!("not a number of threads; write one in 1..={MOST_THREADS}, or unset it for one a core"),
    };
    Err(Refusal::Request(format!("RAYON_NUM_THREADS={threads}: {reason}")))
}

fn refuse_in_json(message: &str) -> Result<(), Refusal> {
    output::stdout(&report::json::refused(message.trim_end()))
}

/// Whether JSON was asked for, read off the raw arguments: a wrong request must be answered in the format
/// it asks for, and a wrong request is one that does not parse.
fn asks_for_json(args: &[OsString]) -> bool {
    let args: Vec<_> = args.iter().take_while(|arg| *arg != "--").collect();
    args.iter().any(|arg| *arg == "--format=json")
        || args.windows(2).any(|pair| pair[0] == "--format" && pair[1] == "json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn json_is_seen_in_requests_that_do_not_parse() {
        let asks = |line: &str| asks_for_json(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert!(asks("assay gate --format json --no-such-flag"));
        assert!(asks("assay gate --no-such-flag --format=json"));
        assert!(!asks("assay gate --format human"));
        assert!(!asks("assay gate -- --format=json"));
    }
}
