//! The types over AscendCL, on the library that stands in for it: what they take they give back, a wait is never
//! endless, and errors name the call and the code.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(unix)]

use std::fs;
use std::time::Duration;

use assay_tests::Machine;
use device::acl::{AclError, Argument, LoadError, Runtime};

const SECOND: Duration = Duration::from_secs(1);

fn open(machine: &Machine) -> Runtime {
    Runtime::open(&[machine.library()]).unwrap()
}

#[test]
fn memory_goes_there_and_back_and_sizes_are_checked() {
    let machine = Machine::new("");
    {
        let runtime = open(&machine);
        let device = runtime.device(0).unwrap();
        let buffer = device.buffer(64).unwrap();
        let data: Vec<u8> = (0..64).collect();
        buffer.upload(&data).unwrap();
        let mut back = vec![0; 64];
        buffer.download(&mut back).unwrap();
        assert_eq!(back, data);
        buffer.fill(7).unwrap();
        buffer.download(&mut back[..10]).unwrap();
        assert_eq!((&back[..10], &back[10..]), (&[7; 10][..], &data[10..]));
        for refused in [buffer.upload(&[0; 65]), buffer.download(&mut [0; 65])] {
            assert!(matches!(refused, Err(AclError::Refused { call: "aclrtMemcpy", .. })), "{refused:?}");
        }
        assert_eq!(device.buffer(0).unwrap_err().code(), Some(207_001));
    }
    assert_eq!(machine.log().last().unwrap(), "finalize memory=0 streams=0 events=0 binaries=0");
}

#[test]
fn a_device_is_opened_once_and_only_where_there_is_one() {
    let machine = Machine::new("devices=2");
    let runtime = open(&machine);
    assert_eq!(runtime.device_count().unwrap(), 2);
    let first = runtime.device(0).unwrap();
    assert_eq!(runtime.device(0).unwrap_err(), AclError::InUse { index: 0 });
    assert_eq!(runtime.device(2).unwrap_err(), AclError::NoDevice { index: 2, count: 2 });
    assert_eq!(runtime.device(-1).unwrap_err(), AclError::NoDevice { index: -1, count: 2 });
    // Another device may be used in between: each call sets its own.
    let second = runtime.device(1).unwrap();
    let (a, b) = (first.buffer(8).unwrap(), second.buffer(8).unwrap());
    a.upload(&[1; 8]).unwrap();
    b.upload(&[2; 8]).unwrap();
    drop((a, b));
    drop(first);
    let again = runtime.device(0).unwrap();
    assert_eq!(again.facts().unwrap().soc.as_deref(), Some("Ascend-mock"));
    let sets = machine.log().iter().filter(|line| line.starts_with("set_device")).count();
    assert!(sets >= 5, "{:?}", machine.log());
}

#[test]
fn each_thread_may_have_a_runtime() {
    let machine = Machine::new("");
    let runtime = open(&machine);
    let device = runtime.device(0).unwrap();
    let buffer = device.buffer(8).unwrap();
    let library = machine.library();
    std::thread::spawn(move || {
        // The library is initialized already: this runtime does not give it back.
        let runtime = Runtime::open(&[library]).unwrap();
        runtime.device(0).unwrap().buffer(8).unwrap().upload(&[3; 8]).unwrap();
    })
    .join()
    .unwrap();
    buffer.upload(&[1; 8]).unwrap();
    assert!(!machine.log().iter().any(|line| line.starts_with("finalize")), "{:?}", machine.log());
}

/// A kernel that stores eight bytes at its first argument.
fn kernel(machine: &Machine) -> std::path::PathBuf {
    let path = machine.dir.path().join("k.txt");
    fs::write(machine.dir.path().join("bytes"), [9; 8]).unwrap();
    fs::write(machine.dir.path().join("value"), 5i32.to_le_bytes()).unwrap();
    fs::write(&path, "function f\nstore 0 bytes\nexpect 1 value\n").unwrap();
    path
}

#[test]
fn a_kernel_runs_in_a_stream_and_events_tell_its_time() {
    let machine = Machine::new("");
    let path = kernel(&machine);
    let runtime = open(&machine);
    runtime.can_launch().unwrap();
    let device = runtime.device(0).unwrap();
    let module = device.module(&path).unwrap();
    let function = module.function("f").unwrap();
    let missing = module.function("g").unwrap_err();
    assert_eq!(missing.fault().unwrap().name, "ACL_ERROR_RT_KERNEL_LOOKUP");
    assert!(missing.to_string().starts_with("looking for kernel g: aclrtBinaryGetFunction returned"), "{missing}");
    let buffer = device.buffer(24).unwrap();
    buffer.fill(0).unwrap();
    let (start, end) = (device.event().unwrap(), device.event().unwrap());
    let stream = device.stream().unwrap();
    assert!(!start.has_happened().unwrap());
    stream.record(&start).unwrap();
    stream.launch(&function, 2, &[Argument::Address(&buffer, 8), Argument::Value(&5i32.to_le_bytes())]).unwrap();
    stream.record(&end).unwrap();
    end.wait(SECOND).unwrap();
    stream.wait(SECOND).unwrap();
    assert!(end.since(&start).unwrap() > 0.0);
    let mut back = [1; 24];
    buffer.download(&mut back).unwrap();
    assert_eq!(back, [[0; 8], [9; 8], [0; 8]].concat()[..]);
    let beyond = stream.launch(&function, 2, &[Argument::Address(&buffer, 25)]).unwrap_err();
    assert!(matches!(beyond, AclError::Refused { call: "aclrtKernelArgsAppend", .. }), "{beyond}");
}

#[test]
fn what_hangs_is_given_up_by_force() {
    let machine = Machine::new("hang");
    let path = kernel(&machine);
    {
        let runtime = open(&machine);
        let device = runtime.device(0).unwrap();
        let module = device.module(&path).unwrap();
        let function = module.function("f").unwrap();
        let buffer = device.buffer(8).unwrap();
        let event = device.event().unwrap();
        let stream = device.stream().unwrap();
        stream.launch(&function, 1, &[Argument::Address(&buffer, 0), Argument::Value(&5i32.to_le_bytes())]).unwrap();
        stream.record(&event).unwrap();
        assert_eq!(event.wait(SECOND).unwrap_err().code(), Some(507_047));
        let error = stream.wait(Duration::from_millis(1500)).unwrap_err();
        assert_eq!((error.code(), error.fault().unwrap().name), (Some(507_046), "RT_STREAM_SYNC_TIMEOUT"));
        assert!(error.to_string().starts_with("waiting for the device, 1.5 s at most: "), "{error}");
    }
    let log = machine.log();
    let tail: Vec<&str> = log.iter().map(String::as_str).rev().take(6).collect();
    let nothing = "memory=0 streams=0 events=0 binaries=0";
    assert_eq!(
        tail,
        [
            &format!("finalize {nothing}")[..],
            &format!("reset_device_force 0 {nothing}"),
            "unload_binary",
            "free",
            "destroy_stream_force",
            "synchronize 1500"
        ]
    );
}

#[test]
fn a_stream_that_nobody_waited_for_is_not_waited_for() {
    let machine = Machine::new("");
    let path = kernel(&machine);
    {
        let runtime = open(&machine);
        let device = runtime.device(0).unwrap();
        let module = device.module(&path).unwrap();
        let function = module.function("f").unwrap();
        let buffer = device.buffer(8).unwrap();
        let stream = device.stream().unwrap();
        stream.launch(&function, 1, &[Argument::Address(&buffer, 0), Argument::Value(&5i32.to_le_bytes())]).unwrap();
    }
    assert!(machine.log().contains(&"destroy_stream_force".to_owned()), "{:?}", machine.log());
}

#[test]
fn a_library_that_is_another_is_refused_by_what_it_lacks() {
    let error = Runtime::open(&["libm.so.6".into()]).unwrap_err();
    assert!(matches!(&error, AclError::Load(LoadError::Incomplete { .. })), "{error}");
    assert!(error.to_string().contains("has no function aclInit, which CANN 5 has"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let error = Runtime::open(&[dir.path().join("libascendcl.so"), "libascendcl-that-is-not.so".into()]).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("(not there), libascendcl-that-is-not.so (not in the loader's path)"), "{text}");
}
