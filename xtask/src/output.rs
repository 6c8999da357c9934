//! Writing to the terminal or a pipe: colour only where it can be seen, and a reader that leaves early
//! (`assay gate | head`) ends the output, not the program.

use std::io::{self, Write};

use crate::refusal::Refusal;

/// Writes to standard output.
///
/// # Errors
/// Standard output cannot take it (a full disk); a closed pipe is no error.
pub fn stdout(text: &str) -> Result<(), Refusal> {
    tolerate(write(&mut anstream::stdout().lock(), text))
        .map_err(|error| Refusal::Write { path: "standard output".into(), error })
}

/// Writes to standard error. Where that fails there is nobody left to tell.
pub fn stderr(text: &str) {
    let _ = write(&mut anstream::stderr().lock(), text);
}

fn write(stream: &mut impl Write, text: &str) -> io::Result<()> {
    stream.write_all(text.as_bytes())?;
    stream.flush()
}

fn tolerate(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
