//! `assay gate --device`: kernels launched through AscendCL, a library of the tests in its place. A right kernel
//! passes; writes outside, elements never written and launches that differ fail; what the device cannot run is
//! unjudged, with the code's name and advice; and everything that was taken is given back, in the right order.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(unix)]

use std::fs;
use std::process::Output;

use assay_tests::{Bench, Kernel, Machine};
use serde_json::Value;

fn bench() -> &'static Bench {
    Bench::recorded("mini/active2")
}

/// Runs the gate on a kernel: exit code and report.
fn gate(machine: &Machine, kernel: &Kernel, more: &[&str]) -> (i32, Value) {
    let args = [&["gate", "--device", "ascend:0", "--format", "json", kernel.text()], more].concat();
    let ran = machine.run(&args);
    let report = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{}", stderr(&ran)));
    (ran.status.code().unwrap(), report)
}

fn stderr(ran: &Output) -> String {
    String::from_utf8_lossy(&ran.stderr).into_owned()
}

/// A check of the first case: verdict and detail.
fn check<'r>(report: &'r Value, name: &str) -> (&'r str, &'r str) {
    let checks = report["cases"][0]["checks"].as_array().unwrap();
    let check = checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name} in {report:#}"));
    (check["verdict"].as_str().unwrap(), check["detail"].as_str().unwrap())
}

#[track_caller]
fn has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

/// Nothing of a device is left when it is reset.
#[track_caller]
fn gave_everything_back(machine: &Machine) {
    let log = machine.log();
    let resets: Vec<&String> = log.iter().filter(|line| line.starts_with("reset_device")).collect();
    assert!(!resets.is_empty(), "{log:?}");
    for line in resets {
        assert!(line.ends_with("memory=0 streams=0 events=0 binaries=0"), "{log:?}");
    }
    assert_eq!(log.last().map(String::as_str), Some("finalize memory=0 streams=0 events=0 binaries=0"));
    assert!(!log.iter().any(|line| line.starts_with("synchronize -") || line == "synchronize 0"), "{log:?}");
}

#[test]
fn a_right_kernel_passes_and_everything_is_given_back_in_order() {
    let machine = Machine::new("");
    let kernel = machine.kernel("a", bench());
    let ran = machine.run(&["gate", "--device", "ascend:0", "--repeat", "3", kernel.text()]);
    let text = String::from_utf8(ran.stdout.clone()).unwrap();
    assert_eq!(ran.status.code(), Some(0), "{text}{}", stderr(&ran));
    has(
        &text,
        &["PASS mini/active2", "npu, kernel 0a1b2c3d, launched on ascend:0 (Ascend-mock)", "10 of 10 checks pass"],
    );
    gave_everything_back(&machine);
    let log = machine.log();
    let at =
        |line: &str| log.iter().position(|found| found.starts_with(line)).unwrap_or_else(|| panic!("{line}: {log:?}"));
    let last = |line: &str| log.iter().rposition(|found| found == line).unwrap();
    assert_eq!(log.iter().filter(|line| *line == "launch").count(), 3);
    assert!(
        at("init") < at("set_device 0") && at("set_device 0") < at("load_binary") && at("load_binary") < at("malloc")
    );
    assert!(last("launch") < at("destroy_stream") && at("destroy_stream") < at("free"), "{log:?}");
    assert!(last("free") < at("unload_binary") && at("unload_binary") < at("reset_device 0"), "{log:?}");

    let (code, report) = gate(&machine, &kernel, &[]);
    assert_eq!((code, report["verdict"].as_str()), (0, Some("pass")));
    assert_eq!(check(&report, "bounds").0, "pass");
    assert_eq!(check(&report, "written").0, "pass");
    // What the launch gave is what the bundle recorded.
    let recorded = machine.run(&["gate", "--format", "json", Bench::path("mini/active2").to_str().unwrap()]);
    let recorded: Value = serde_json::from_slice(&recorded.stdout).unwrap();
    assert_eq!(report["cases"][0]["tensors"], recorded["cases"][0]["tensors"]);
}

#[test]
fn writes_outside_are_found_and_named() {
    let machine = Machine::new("");
    let kernel = machine.kernel("a", bench());
    let out = kernel.index("out");
    let end = 16 * 2560 * 2;
    for (tensor, offset, words) in [
        (
            "out",
            end + 6,
            "4 bytes written behind out, the nearest 7 bytes behind its last (launch 1; found 11 11 11 11)",
        ),
        ("out", -4, "4 bytes written before out, the nearest 1 byte before its first"),
        ("wq", 1000, "written in wq, which the kernel only reads, from byte 1000 on"),
        ("block_table", 64, "written in block_table, which the kernel only reads"),
        ("k_cache", -8, "4 bytes written before k_cache, the nearest 5 bytes before its first"),
    ] {
        machine.plan(&format!("wild={}:{offset}", kernel.index(tensor)));
        let (code, report) = gate(&machine, &kernel, &[]);
        assert_eq!((code, check(&report, "bounds").0), (1, "fail"), "{tensor}");
        has(check(&report, "bounds").1, &[words]);
        assert_eq!(report["cases"][0]["first_divergence"], tensor);
        gave_everything_back(&machine);
    }
    // The last write reaches from the tensor into its margin: two bytes are the tensor's own, and drift.
    machine.plan(&format!("wild={out}:{}", end - 2));
    let (code, report) = gate(&machine, &kernel, &[]);
    assert_eq!(code, 1);
    has(check(&report, "bounds").1, &["2 bytes written behind out, the nearest 1 byte behind its last"]);
    let text = machine.run(&["gate", "--device", "ascend:0", kernel.text()]);
    has(
        &String::from_utf8(text.stdout).unwrap(),
        &["FAIL mini/active2", "check bounds: FAIL: 2 bytes written behind out"],
    );
}

#[test]
fn elements_that_were_never_written_are_named() {
    let machine = Machine::new("");
    let kernel = machine.kernel("a", bench());
    for (tensor, offset, words) in [
        ("out", 2 * (2560 + 10), "out: 2 of 40960 elements were never written, first [1, 10] (row 1; launch 1)"),
        ("normed_i8", 8, "normed_i8: 4 of 40960 elements were never written, first [0, 8]"),
        ("act_scales", 12, "act_scales: 1 of 16 elements were never written, first [3, 0]"),
    ] {
        machine.plan(&format!("skip={}:{offset}", kernel.index(tensor)));
        let (code, report) = gate(&machine, &kernel, &[]);
        assert_eq!((code, check(&report, "written").0), (1, "fail"), "{tensor}");
        has(check(&report, "written").1, &[words]);
        assert_eq!(report["cases"][0]["first_divergence"], tensor);
    }
}

#[test]
fn launches_that_differ_are_named() {
    let machine = Machine::new("");
    let kernel = machine.kernel("a", bench());
    machine.plan(&format!("flip={}:{}", kernel.index("q_proj"), 4 * (2560 * 2 + 7)));
    let (code, report) = gate(&machine, &kernel, &["--repeat", "3"]);
    assert_eq!((code, check(&report, "repeatable").0), (1, "fail"));
    has(
        check(&report, "repeatable").1,
        &[
            "launch 2 and launch 1 differ at q_proj: 1 of 40960 elements, first [2, 7]",
            "2 of 2 further launches differ",
        ],
    );
    assert_eq!(report["cases"][0]["first_divergence"], "q_proj");
    // Where it is launched once nothing is known of it.
    let (code, report) = gate(&machine, &kernel, &[]);
    assert_eq!(code, 0);
    assert!(!report.to_string().contains("repeatable"));

    // A cache row that only some launches write.
    machine.plan(&format!("flip={}:{}", kernel.index("v_cache"), 2 * 128 * 5));
    let (code, report) = gate(&machine, &kernel, &["--repeat", "2"]);
    assert_eq!(code, 1);
    has(check(&report, "repeatable").1, &["differ at v_written_values: cache row 5 was written by one of them only"]);
}

#[test]
fn what_a_device_cannot_run_is_unjudged_and_everything_is_given_back() {
    let machine = Machine::new("");
    let kernel = machine.kernel("a", bench());
    let forced = ["destroy_stream_force", "reset_device_force 0"];
    for (plan, more, words, forced) in [
        (
            "malloc=3",
            &[][..],
            &["bytes of device memory for wq", "ACL_ERROR_RT_MEMORY_ALLOCATION (207001)", "fewer pages"][..],
            None,
        ),
        (
            "refuse=507899",
            &[],
            &["launch 1 of 1, replay: aclrtLaunchKernelWithConfig returned RT_DRV_INTERNAL_ERROR (507899)"],
            Some(forced),
        ),
        (
            "launch=507015",
            &[],
            &[
                "RT_AICORE_EXCEPTION (507015)",
                "address out of range",
                "(the runtime says: EZ9999: Inner Error! [mock] as asked)",
            ],
            Some(forced),
        ),
        ("launch=507018@2", &["--repeat", "3"], &["launch 2 of 3", "RT_AICPU_EXCEPTION (507018)"], Some(forced)),
        ("launch=424242,silent", &[], &["424242, a code that this program does not know"], Some(forced)),
        (
            "hang",
            &["--timeout", "7"],
            &["waiting for replay at most 7 s", "RT_STREAM_SYNC_TIMEOUT (507046)", "a kernel hangs"],
            Some(forced),
        ),
        ("download=507901", &[], &["from the device: aclrtMemcpy returned ACL_ERROR_RT_SOCKET_CLOSE (507901)"], None),
    ] {
        machine.plan(plan);
        let (code, report) = gate(&machine, &kernel, more);
        assert_eq!((code, report["verdict"].as_str()), (125, Some("unjudged")), "{plan}");
        let (verdict, detail) = check(&report, "device");
        assert_eq!(verdict, "unjudged");
        has(detail, words);
        gave_everything_back(&machine);
        let log = machine.log();
        for line in forced.into_iter().flatten() {
            assert!(log.iter().any(|found| found.starts_with(line)), "{plan}: no {line} in {log:?}");
        }
    }
    machine.plan("hang");
    let ran = machine.run(&["gate", "--device", "ascend:0", "--timeout", "7", kernel.text()]);
    let text = String::from_utf8(ran.stdout).unwrap();
    has(
        &text,
        &[
            "UNJUDGED mini/active2",
            "Not judged: launch 1 of 1, waiting for replay at most 7 s",
            "(exit code 125: could not be judged)",
        ],
    );
    assert!(machine.log().contains(&"synchronize 7000".to_owned()));
}

#[test]
fn a_machine_without_what_it_takes_says_what_is_missing() {
    let machine = Machine::new("");
    let kernel = machine.kernel("a", bench());
    machine.plan("init=500000");
    let (code, report) = gate(&machine, &kernel, &[]);
    assert_eq!(code, 125);
    has(check(&report, "device").1, &["initializing AscendCL: aclInit returned ACL_ERROR_INTERNAL_ERROR (500000)"]);
    machine.plan("devices=0");
    let (code, report) = gate(&machine, &kernel, &[]);
    assert_eq!(code, 125);
    has(check(&report, "device").1, &["there is no device 0: AscendCL counts 0 here"]);

    fs::remove_file(machine.library()).unwrap();
    let (code, report) = gate(&machine, &kernel, &[]);
    assert_eq!(code, 125);
    has(
        check(&report, "device").1,
        &["AscendCL (libascendcl.so) was not found", "libascendcl.so (not there)", "ASSAY_ASCENDCL"],
    );
    fs::write(machine.library(), "no library").unwrap();
    let (code, report) = gate(&machine, &kernel, &[]);
    assert_eq!(code, 125);
    has(check(&report, "device").1, &["was not found; looked at", "libascendcl.so ("]);
}

#[test]
fn a_fault_of_one_case_does_not_reach_the_next() {
    let machine = Machine::new("");
    let (first, second) = (machine.kernel("a", bench()), machine.kernel("b", bench()));
    machine.plan("launch=507015");
    let ran = machine.run(&["gate", "--device", "ascend:0", "--format", "json", first.text(), second.text()]);
    let report: Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(ran.status.code(), Some(125), "{}", stderr(&ran));
    let verdicts: Vec<&str> = [0, 1].map(|case| report["cases"][case]["verdict"].as_str().unwrap()).to_vec();
    assert_eq!(verdicts, ["unjudged", "pass"]);
    gave_everything_back(&machine);
}

#[test]
fn the_kernel_is_given_what_the_case_says() {
    // The mock's kernel asks for its inputs, tables, scalar and cleared workspace: with another it does not run.
    let machine = Machine::new("");
    let kernel = machine.kernel("a", bench());
    for argument in ["hidden_states", "slot_mapping", "v_cache"] {
        let file = kernel.case.with_file_name(format!("expect.{}", kernel.index(argument)));
        let right = fs::read(&file).unwrap();
        let mut wrong = right.clone();
        wrong[3] ^= 1;
        fs::write(&file, wrong).unwrap();
        assert_eq!(gate(&machine, &kernel, &[]).0, 125, "{argument}");
        fs::write(&file, right).unwrap();
    }
}

#[test]
fn wrong_requests_are_refused() {
    let machine = Machine::new("");
    let kernel = machine.kernel("a", bench());
    let refused = |args: &[&str], words: &[&str]| {
        let ran = machine.run(&[&["gate"], args].concat());
        assert_eq!(ran.status.code(), Some(2), "{args:?}: {}", stderr(&ran));
        has(&stderr(&ran), words);
        assert!(machine.log().is_empty(), "nothing was begun");
    };
    let text = kernel.text();
    refused(&["--device", "cuda:0", text], &["expected ascend:N"]);
    refused(&["--repeat", "2", text], &["--device", "--run"]);
    refused(&["--device", "ascend:0", "--timeout", "0", text], &["0"]);
    refused(
        &["--device", "ascend:0", Bench::path("mini/active1").to_str().unwrap()],
        &["names no kernel to launch", "docs/device.md"],
    );
    refused(&["--device", "ascend:0", "--junit", "a/kernel.txt", text], &["kernel.txt is an input of this run"]);
    fs::remove_file(kernel.case.with_file_name("kernel.txt")).unwrap();
    refused(
        &["--device", "ascend:0", text],
        &["case.yaml: device: kernel: binary: ", "kernel.txt", "build the kernel"],
    );
}

#[test]
fn doctor_names_devices_and_what_is_missing() {
    let machine = Machine::new("devices=2");
    let ran = machine.run(&["doctor"]);
    let text = String::from_utf8(ran.stdout).unwrap();
    assert_eq!(ran.status.code(), Some(0));
    has(
        &text,
        &[
            "libascendcl.so\n",
            "interface 1.16.0, runtime 9.1.mock, driver 9.7.mock",
            "ascend:0 Ascend-mock, 64.0 GiB, 48.0 GiB free",
            "ascend:1 Ascend-mock",
            "memory ",
            "free here",
            "tokenizer ",
        ],
    );
    gave_everything_back(&machine);
    machine.plan("devices=0");
    let text = String::from_utf8(machine.run(&["doctor"]).stdout).unwrap();
    has(&text, &["devices       none", "npu-smi info"]);
    fs::remove_file(machine.library()).unwrap();
    let ran = machine.run(&["doctor"]);
    let text = String::from_utf8(ran.stdout).unwrap();
    assert_eq!(ran.status.code(), Some(0));
    has(
        &text,
        &["AscendCL      not found; looked at\n", "libascendcl.so (not there)", "cannot launch kernels (--device)"],
    );
}
