//! `assay doctor`: what this program is and what it found on this machine.

use std::fmt::Write as _;

use crate::exit_codes::Code;
use crate::refusal::Refusal;
use crate::{output, suites};

/// Prints version, CPU, threads, kernels and suites.
///
/// # Errors
/// Standard output cannot be written.
pub fn run() -> Result<Code, Refusal> {
    let features = cpu_features();
    let features = if features.is_empty() { "none that the kernels use".into() } else { features.join(" ") };
    let threads = rayon::current_num_threads();
    let suites = match suites::all() {
        Ok(files) => files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", "),
        Err(refusal) => format!("not found: {refusal}"),
    };
    let mut text = String::new();
    let lines = [
        ("version", format!("assay {}", env!("CARGO_PKG_VERSION"))),
        ("platform", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)),
        ("CPU features", features),
        ("threads", threads.to_string()),
        ("kernels", kernels()),
        ("suites", suites),
    ];
    for (what, found) in lines {
        let _ = writeln!(text, "{what:<13} {found}");
    }
    output::stdout(&text)?;
    Ok(Code::Pass)
}

/// The level in use with what it needs, and the others this CPU has.
fn kernels() -> String {
    let used = reference::kernels::kernels();
    let others = reference::kernels::levels().iter().filter(|level| level.name() != used.name());
    let others: Vec<&str> = others.map(|level| level.name()).collect();
    let others =
        if others.is_empty() { String::new() } else { format!("; --kernels also takes {}", others.join(", ")) };
    format!("{} ({}){others}", used.name(), used.needs())
}

macro_rules! detected {
    ($detect:ident: $($feature:tt)*) => {
        [$(($feature, std::arch::$detect!($feature))),*]
            .into_iter().filter(|(_, found)| *found).map(|(feature, _)| feature).collect()
    };
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<&'static str> {
    detected!(is_x86_feature_detected: "sse4.1" "avx" "fma" "f16c" "avx2" "avx512f" "avx512bw" "avx512vl" "avx512vnni" "avx512bf16" "avxvnni" "sha")
}

#[cfg(target_arch = "aarch64")]
fn cpu_features() -> Vec<&'static str> {
    detected!(is_aarch64_feature_detected: "neon" "dotprod" "i8mm" "bf16" "sve" "sve2" "sha2")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> Vec<&'static str> {
    Vec::new()
}
