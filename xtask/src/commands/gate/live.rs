//! `assay gate --device`: kernels that cases name, launched on a device of this machine, and judged as captures are.
//! What the device cannot run is unjudged, with what it says and what to do.

use std::path::{Path, PathBuf};
use std::time::Instant;

use cases::{Case, InputStore, Inputs, Launch, PolicyRequest};
use clap::Args;
use device::Bundle;
use device::acl::{AclError, Limits, Runtime, run};
use goldens::report::CaseReport;
use goldens::{Only, Progress as _, launched};

use super::Gate;
use crate::progress::Bar;
use crate::refusal::Refusal;
use crate::report;

/// Longest wait for one launch, unless the request says another.
const WAIT: u64 = 120;

/// The part of the request that is about a device.
#[derive(Args)]
pub struct Live {
    /// Launch the kernel that each case names on this device and judge what it gives, in place of captures
    #[arg(long, value_name = "ascend:N", group = "backend", value_parser = ascend)]
    device: Option<i32>,
}

impl Live {
    /// The device asked for.
    pub fn device(&self) -> Option<i32> {
        self.device
    }

    /// The kernel binaries that the cases of a run name, where it launches any.
    pub fn binaries(&self, files: &[PathBuf]) -> Vec<PathBuf> {
        let files = files.iter().filter(|_| self.device.is_some());
        // A case that is wrong is refused where it is read to be run.
        let cases = files.filter_map(|file| Case::load(file).ok());
        cases.filter_map(|case| launch(&case).map(|launch| binary(&case, launch))).collect()
    }
}

impl Gate {
    /// Launches and judges every case.
    pub(super) fn launch_all(
        &self,
        device: i32,
        files: &[PathBuf],
        policy: Option<&PolicyRequest>,
        only: Option<&Only>,
    ) -> Result<(Vec<CaseReport>, Vec<Case>), Refusal> {
        let cases = files.iter().map(|file| launchable(file)).collect::<Result<Vec<_>, _>>()?;
        let (store, bar) = (InputStore::new(), Bar::new(cases.len()));
        let runtime = Runtime::find().and_then(|runtime| runtime.can_launch().map(|()| runtime));
        let mut reports = Vec::new();
        let mut ran = Vec::new();
        for (case, launch) in cases {
            let started = Instant::now();
            bar.begin(&case.name);
            let inputs = Inputs::generate(&case, &store)?;
            let step = |what: &str| bar.step(what);
            let limits = Limits { launches: self.limits.repeat() as usize, wait: self.limits.timeout(WAIT) };
            // A device of its own for each case: what one leaves behind must not reach the next.
            let observed = runtime.as_ref().map_err(AclError::clone).and_then(|runtime| {
                let device = runtime.device(device)?;
                run(&device, &case, &launch, &inputs, limits, &step)
            });
            let (mut report, case) = match observed {
                Ok(mut observed) => {
                    let captures = Some(std::mem::take(&mut observed.captures));
                    let mut bundle = Bundle { dir: case.directory().to_path_buf(), case, captures };
                    let mut report = self.judge_one(&bundle, policy, only, &store, &bar)?;
                    observed.captures = bundle.captures.take().unwrap_or_default();
                    launched::add_checks(&mut report, &observed);
                    (report, bundle.case)
                }
                Err(error) => (CaseReport::unjudged(&case, launched::DEVICE, &error.to_string()), case),
            };
            report.path = report::text::place(&case.path);
            report.seconds = started.elapsed().as_secs_f64();
            reports.push(report);
            ran.push(case);
            bar.done();
        }
        Ok((reports, ran))
    }
}

/// A case with the kernel that it names, whose binary is there.
fn launchable(file: &Path) -> Result<(Case, Launch), Refusal> {
    let case = Case::load(file)?;
    let Some(launch) = launch(&case).cloned() else {
        return Err(Refusal::Request(format!(
            "{}: names no kernel to launch; add `device: {{kind: npu, kernel: {{binary: ..., function: ..., \
             blocks: ..., arguments: [...]}}}}`, as docs/device.md shows",
            case.path.display()
        )));
    };
    let binary = binary(&case, &launch);
    match std::fs::metadata(&binary) {
        Ok(found) if found.is_file() => Ok((case, launch)),
        found => {
            let why = found.map_or_else(|error| error.to_string(), |_| "not a regular file".to_owned());
            Err(Refusal::Request(format!(
                "{}: device: kernel: binary: {}: {why}; build the kernel, or correct the path, which is relative to \
                 the case file",
                case.path.display(),
                binary.display()
            )))
        }
    }
}

fn launch(case: &Case) -> Option<&Launch> {
    case.device.as_ref()?.kernel.as_deref()
}

fn binary(case: &Case, launch: &Launch) -> PathBuf {
    device::acl::binary(case, launch)
}

fn ascend(text: &str) -> Result<i32, String> {
    let index = text.strip_prefix("ascend:").filter(|index| index.bytes().all(|digit| digit.is_ascii_digit()));
    index.and_then(|index| index.parse().ok()).ok_or_else(|| "expected ascend:N, such as ascend:0".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_go_by_kind_and_number() {
        assert_eq!((ascend("ascend:0"), ascend("ascend:15")), (Ok(0), Ok(15)));
        for text in ["ascend", "ascend:", "ascend:-1", "ascend:x", "cuda:0", "0", "ascend:99999999999"] {
            assert!(ascend(text).is_err(), "{text}");
        }
    }
}
