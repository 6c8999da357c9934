//! Bundles on disk, for tests that read them back or break them.

use std::path::Path;

use ::device::{CAPTURES_FILE, write_captures};
use cases::{CASE_FILE, Case, DeviceInfo, DeviceKind};

use crate::Bench;

impl Bench {
    /// Writes this bench as a bundle, with the hashes of its inputs.
    pub fn write(&self, folder: &Path) {
        std::fs::create_dir_all(folder).unwrap();
        let device = DeviceInfo {
            kind: DeviceKind::Emulated,
            kernel_revision: Some("0a1b2c3d".to_owned()),
            exp_ulp: None,
            kernel: None,
        };
        let case = Case { device: Some(device), inputs_sha256: self.inputs.hashes(), ..self.case.clone() };
        std::fs::write(folder.join(CASE_FILE), case.to_yaml()).unwrap();
        write_captures(&folder.join(CAPTURES_FILE), &self.captures).unwrap();
    }
}
