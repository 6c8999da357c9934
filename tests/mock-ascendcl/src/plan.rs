//! How a device fails, in words separated by commas.

use std::ffi::CStr;
use std::path::PathBuf;

/// What was asked for.
#[derive(Clone, Debug)]
pub struct Plan {
    /// `devices=N`: so many devices; one otherwise.
    pub devices: u32,
    /// `init=CODE`: `aclInit` gives this code.
    pub init: Option<i32>,
    /// `malloc=N`: the N-th allocation, from 1, finds no memory.
    pub malloc: Option<usize>,
    /// `refuse=CODE`: the launch itself gives this code.
    pub refuse: Option<i32>,
    /// `launch=CODE`: waiting for a launched kernel gives this code; `launch=CODE@N`, that of the N-th launch, from 1.
    pub launch: Option<(i32, usize)>,
    /// `hang`: a launched kernel never ends.
    pub hang: bool,
    /// `download=CODE`: copies to the host give this code.
    pub download: Option<i32>,
    /// `silent`: no message belongs to an error.
    pub says_nothing: bool,
    /// `wild=ARGUMENT:OFFSET`: the kernel writes four bytes of 0x11 there too, relative to where an argument points.
    pub wild: Option<(usize, isize)>,
    /// `flip=ARGUMENT:OFFSET`: from the second launch on, the lowest bit of a byte is turned.
    pub flip: Option<(usize, isize)>,
    /// `skip=ARGUMENT:OFFSET`: four bytes from there on are not written.
    pub skip: Option<(usize, isize)>,
    /// `log=FILE`: calls are written there, one a line.
    pub log: Option<PathBuf>,
}

impl Plan {
    /// The plan in the file beside this copy of the library; a right device where there is none.
    pub fn beside_library() -> Self {
        let mut found = libc::Dl_info {
            dli_fname: std::ptr::null(),
            dli_fbase: std::ptr::null_mut(),
            dli_sname: std::ptr::null(),
            dli_saddr: std::ptr::null_mut(),
        };
        // SAFETY: the place is one of this library's own functions, and what is found is written where it may be.
        let there = unsafe { libc::dladdr(Self::beside_library as *const () as *const libc::c_void, &mut found) };
        assert!(there != 0 && !found.dli_fname.is_null(), "the library knows where it is");
        // SAFETY: not null, and the loader's names are zero-terminated.
        let library = unsafe { CStr::from_ptr(found.dli_fname) }.to_str().expect("tests use UTF-8");
        Self::parse(&std::fs::read_to_string(format!("{library}.plan")).unwrap_or_default())
    }

    /// Reads the words.
    pub fn parse(words: &str) -> Self {
        let mut plan = Self {
            devices: 1,
            init: None,
            malloc: None,
            refuse: None,
            launch: None,
            hang: false,
            download: None,
            says_nothing: false,
            wild: None,
            flip: None,
            skip: None,
            log: None,
        };
        for word in words.split(',').filter(|word| !word.is_empty()) {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            match key {
                "devices" => plan.devices = value.parse().expect(word),
                "init" => plan.init = Some(value.parse().expect(word)),
                "malloc" => plan.malloc = Some(value.parse().expect(word)),
                "refuse" => plan.refuse = Some(value.parse().expect(word)),
                "launch" => {
                    let (code, at) = value.split_once('@').unwrap_or((value, "1"));
                    plan.launch = Some((code.parse().expect(word), at.parse().expect(word)));
                }
                "hang" => plan.hang = true,
                "download" => plan.download = Some(value.parse().expect(word)),
                "silent" => plan.says_nothing = true,
                "wild" => plan.wild = Some(place(value)),
                "flip" => plan.flip = Some(place(value)),
                "skip" => plan.skip = Some(place(value)),
                "log" => plan.log = Some(value.into()),
                _ => panic!("{word:?} is unknown"),
            }
        }
        plan
    }
}

/// `ARGUMENT:OFFSET`.
fn place(text: &str) -> (usize, isize) {
    let (argument, offset) = text.split_once(':').expect(text);
    (argument.parse().expect(text), offset.parse().expect(text))
}
