//! Progress on a terminal's standard error; silent in a pipe.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::report::text::plain;

/// A bar over the cases of a run, with the step at work beside it, or over the bytes of a file
/// or the tokens of a run.
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar over this many cases. indicatif draws it only where standard error is a terminal.
    pub fn new(cases: usize) -> Self {
        let bar = ProgressBar::new(cases as u64);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {pos}/{len} {prefix} {wide_msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }

    /// A bar over this many bytes.
    pub fn of_bytes(bytes: u64) -> Self {
        let bar = ProgressBar::new(bytes);
        let template = "{spinner} {bytes}/{total_bytes} {bar:40} {bytes_per_sec} {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// A bar over this many tokens of a run.
    pub fn of_tokens(tokens: usize) -> Self {
        let bar = ProgressBar::new(tokens as u64);
        if let Ok(style) = ProgressStyle::with_template("{spinner} {pos}/{len} tokens {bar:40} {elapsed}, {eta} left") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }

    /// So many bytes or tokens are done.
    pub fn reached(&self, done: u64) {
        self.0.set_position(done);
    }

    /// A case is done.
    pub fn done(&self) {
        self.0.inc(1);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

impl goldens::Progress for Bar {
    fn begin(&self, case: &str) {
        self.0.set_prefix(plain(case).into_owned());
        self.0.set_message("");
    }

    fn step(&self, step: &str) {
        self.0.set_message(plain(step).into_owned());
    }
}
