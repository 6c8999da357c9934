//! `assay doctor`: what this program is and what it found on this machine.

use device::acl::{AclError, LoadError, Runtime};

use crate::exit_codes::Code;
use crate::refusal::Refusal;
use crate::report::doctor::{Fact, render, size};
use crate::{output, suites};

/// Devices that are shown.
const MOST_DEVICES: u32 = 64;

/// Prints version, CPU, memory, disk, threads, kernels, suites, tokenizer and devices.
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
    let mut facts = vec![
        Fact::new("version", format!("assay {}", env!("CARGO_PKG_VERSION"))),
        Fact::new("platform", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)),
        Fact::new("CPU features", features),
        Fact::new("threads", threads.to_string()),
        Fact::new("kernels", kernels()),
        Fact::new("memory", memory()),
        Fact::new("disk", disk()),
        Fact::new("suites", suites),
        Fact::new("tokenizer", "built in: prompts as text, for checkpoints that hold a tokenizer.json"),
    ];
    facts.extend(devices());
    output::stdout(&render(&facts))?;
    Ok(Code::Pass)
}

/// Total and free memory, where the system tells.
fn memory() -> String {
    let Ok(text) = std::fs::read_to_string("/proc/meminfo") else { return "the system does not tell".to_owned() };
    let kib = |key: &str| {
        let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
        rest.split_whitespace().next()?.parse::<u64>().ok()
    };
    match (kib("MemTotal:"), kib("MemAvailable:")) {
        (Some(total), Some(free)) => {
            let [total, free] = [total, free].map(|kib| size(kib.saturating_mul(1024)));
            format!("{total}, {free} available")
        }
        _ => "the system does not tell".to_owned(),
    }
}

/// Free space where this program runs.
fn disk() -> String {
    match fs4::available_space(".") {
        Ok(bytes) => format!("{} free here", size(bytes)),
        Err(error) => format!("the system does not tell: {error}"),
    }
}

/// AscendCL and the devices that it sees, or where it was looked for.
fn devices() -> Vec<Fact> {
    const NAME: &str = "AscendCL";
    let without = |found: Vec<String>, remedy: &str| {
        let lacking = format!("without it assay gate judges captures, and cannot launch kernels (--device); {remedy}");
        vec![Fact { name: NAME, found, lacking: Some(lacking) }]
    };
    let runtime = match Runtime::find() {
        Ok(runtime) => runtime,
        Err(AclError::Load(LoadError::Absent(searched))) => {
            let tried = searched.iter().map(|at| format!("  {} ({})", at.place.display(), at.why));
            let found = std::iter::once("not found; looked at".to_owned()).chain(tried).collect();
            let remedy =
                format!("install CANN, source its set_env.sh, or set {} to the library", device::acl::EXPLICIT);
            return without(found, &remedy);
        }
        Err(error) => return without(vec![format!("not usable: {error}")], "repair the installation"),
    };
    let mut facts = vec![Fact {
        name: NAME,
        found: vec![runtime.place().display().to_string()],
        lacking: runtime.can_launch().err().map(|error| format!("kernels cannot be launched (--device): {error}")),
    }];
    let versions = runtime.versions();
    let interface = versions.interface.map(|parts| parts.map(|part| part.to_string()).join("."));
    let known = [("interface", interface), ("runtime", versions.runtime), ("driver", versions.driver)];
    let known = known.into_iter().map(|(part, version)| format!("{part} {}", version.as_deref().unwrap_or("not told")));
    facts.push(Fact::new("versions", known.collect::<Vec<_>>().join(", ")));
    let of_device = |index: u32| {
        let found = i32::try_from(index).map_err(|_| AclError::NoDevice { index: i32::MAX, count: index });
        match found.and_then(|index| runtime.device(index)?.facts()) {
            Ok(found) => {
                let soc = found.soc.unwrap_or_else(|| "a chip without a name".to_owned());
                let memory = found.memory.map(|[free, total]| [free, total].map(|bytes| size(bytes as u64)));
                let memory = memory.map(|[free, total]| format!(", {total}, {free} free")).unwrap_or_default();
                format!("ascend:{index} {soc}{memory}")
            }
            Err(error) => format!("ascend:{index} cannot be used: {error}"),
        }
    };
    facts.push(match runtime.device_count() {
        Ok(0) => Fact {
            name: "devices",
            found: vec!["none".to_owned()],
            lacking: Some(
                "kernels cannot be launched (--device); look at npu-smi info and at /dev/davinci*".to_owned(),
            ),
        },
        Ok(count) => {
            let found = (0..count.min(MOST_DEVICES)).map(of_device).collect();
            Fact { name: "devices", found, lacking: None }
        }
        Err(error) => Fact { name: "devices", found: vec![format!("not counted: {error}")], lacking: None },
    });
    facts
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
    detected!(is_x86_feature_detected: "sse4.1" "avx" "fma" "f16c" "avx2" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512vnni" "avx512vbmi" "avx512bf16" "avxvnni" "sha")
}

#[cfg(target_arch = "aarch64")]
fn cpu_features() -> Vec<&'static str> {
    detected!(is_aarch64_feature_detected: "neon" "dotprod" "i8mm" "bf16" "sve" "sve2" "sha2")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> Vec<&'static str> {
    Vec::new()
}
