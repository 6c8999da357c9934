//! The catalogue of planted faults. Each entry is a device with one fault; the gate must fail it, at the right
//! tensor, in the right words, whether the steps behind the fault follow from it or not, and must pass the same
//! device without it. Entries with a source in the field are in `field`.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod attention;
mod benches;
mod cache;
mod every_tensor;
mod field;
mod steps;

use std::collections::BTreeSet;

use assay_tests::{Bench, Device, said};
use cases::PolicyRequest;
use device::Captures;
use goldens::report::{CaseReport, Verdict};
use reference::TensorId;

/// One entry of the catalogue.
pub struct Fault {
    /// Its name.
    pub id: &'static str,
    /// The device that it is planted into.
    pub on: fn() -> &'static Bench,
    /// What is wrong.
    pub plant: Plant,
    /// Every tensor that fails when the later steps follow from the fault, the first one first; none, where only
    /// a check can say it.
    pub fails: &'static [&'static str],
    /// What the report says, apart from case.
    pub says: &'static [&'static str],
    /// Whether the layer's output alone must show it.
    pub alone: bool,
}

/// How a fault is planted.
#[derive(Clone, Copy)]
pub enum Plant {
    /// Into a step of the device: what follows from it follows, or not.
    Step(fn(&mut Device<'_>)),
    /// Into the captures.
    Captures(fn(&Bench, &mut Captures)),
}

/// A fault that the output alone must show: where it is planted, which tensors fail, what is said.
pub fn gross(
    id: &'static str,
    on: fn() -> &'static Bench,
    fails: &'static [&'static str],
    says: &'static [&'static str],
    plant: fn(&mut Device<'_>),
) -> Fault {
    Fault { id, on, plant: Plant::Step(plant), fails, says, alone: true }
}

/// A fault that the output alone may hide.
pub fn subtle(
    id: &'static str,
    on: fn() -> &'static Bench,
    fails: &'static [&'static str],
    says: &'static [&'static str],
    plant: fn(&mut Device<'_>),
) -> Fault {
    Fault { alone: false, ..gross(id, on, fails, says, plant) }
}

/// A fault in what was captured.
pub fn captured(
    id: &'static str,
    on: fn() -> &'static Bench,
    fails: &'static [&'static str],
    says: &'static [&'static str],
    plant: fn(&Bench, &mut Captures),
) -> Fault {
    Fault { id, on, plant: Plant::Captures(plant), fails, says, alone: false }
}

fn catalogue() -> Vec<Fault> {
    [steps::faults(), attention::faults(), cache::faults(), field::faults()].into_iter().flatten().collect()
}

impl Fault {
    /// The faulty outputs; `follow` lets the later steps follow from the fault.
    fn planted(&self, follow: bool) -> Captures {
        let bench = (self.on)();
        match self.plant {
            Plant::Step(plant) => {
                let mut device = bench.device();
                plant(&mut device);
                if follow {
                    device.follow();
                }
                device.captures()
            }
            Plant::Captures(plant) => {
                let mut captures = bench.captures.clone();
                plant(bench, &mut captures);
                captures
            }
        }
    }

    /// What is wrong with the gate's report on this fault.
    fn complaint(&self) -> Option<String> {
        let report = (self.on)().gate(self.planted(true));
        if let Some(complaint) = self.wrong(&report) {
            return Some(complaint);
        }
        if said::failing(&report) != self.fails {
            return Some(format!("these tensors fail: {:?}, expected {:?}", said::failing(&report), self.fails));
        }
        if matches!(self.plant, Plant::Step(_)) {
            let report = (self.on)().gate(self.planted(false));
            return self.wrong(&report).map(|complaint| format!("with later steps as before: {complaint}"));
        }
        None
    }

    fn wrong(&self, report: &CaseReport) -> Option<String> {
        if report.verdict != Verdict::Fail {
            return Some(format!("verdict {}", report.verdict.name()));
        }
        if report.first_divergence.as_deref() != self.fails.first().copied() {
            return Some(format!("first divergence {:?}, expected {:?}", report.first_divergence, self.fails.first()));
        }
        let words = said::words(report).to_lowercase();
        let missing = self.says.iter().find(|text| !words.contains(&text.to_lowercase()));
        missing.map(|text| format!("the report does not say {text:?}; it says\n{words}"))
    }
}

#[test]
fn every_fault_is_found_where_it_is_and_named() {
    let faults = catalogue();
    let ids: BTreeSet<&str> = faults.iter().map(|fault| fault.id).collect();
    assert_eq!(ids.len(), faults.len(), "an id is used twice");
    let complaints: Vec<String> = faults
        .iter()
        .filter_map(|fault| fault.complaint().map(|complaint| format!("{}: {complaint}", fault.id)))
        .collect();
    assert!(complaints.is_empty(), "{} of {}\n{}", complaints.len(), faults.len(), complaints.join("\n"));
}

#[test]
fn without_their_fault_the_devices_pass() {
    for (name, bench) in benches::ALL {
        let bench = bench();
        said::passes(&bench.gate(bench.captures.clone()), name);
        // A device whose steps were taken apart and put together again is the same device.
        assert_eq!(bench.device().captures(), bench.captures.clone(), "{name}");
    }
}

#[test]
fn the_output_alone_shows_what_it_can() {
    let alone = Some(BTreeSet::from([TensorId::Out]));
    let verdicts: Vec<(&'static str, bool, bool)> = catalogue()
        .iter()
        .filter(|fault| matches!(fault.plant, Plant::Step(_)))
        .map(|fault| {
            let report = (fault.on)().judge(fault.planted(true), &PolicyRequest::Auto, &alone);
            (fault.id, fault.alone, report.verdict == Verdict::Fail)
        })
        .collect();
    // For the curious: `cargo test -- --nocapture` lists what the output alone does not show.
    let silent: Vec<&str> = verdicts.iter().filter(|(.., found)| !found).map(|(id, ..)| *id).collect();
    println!("the output alone does not show: {}", silent.join(", "));
    let surplus: Vec<&str> = verdicts.iter().filter(|(_, must, found)| !must && *found).map(|(id, ..)| *id).collect();
    println!("the output alone shows, though it need not: {}", surplus.join(", "));
    let missed: Vec<&str> = verdicts.iter().filter(|(_, must, found)| *must && !found).map(|(id, ..)| *id).collect();
    assert!(missed.is_empty(), "missed by the output alone: {missed:?}");
}
