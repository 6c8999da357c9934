//! The command line of Assay: `assay` when installed, `cargo xtask` in the repository.
//!
//! Commands hold no judgement of their own. They find what the request names, hand it to `cases`, `device`
//! and `goldens`, and show what came back: one module a command, one a report format, exit codes in one place.

mod bench;
mod cli;
mod commands;
mod exit_codes;
mod output;
mod process;
mod progress;
mod refusal;
mod report;
mod suites;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    cli::run(std::env::args_os().collect()).into()
}
