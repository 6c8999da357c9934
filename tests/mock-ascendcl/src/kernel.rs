//! Kernels of the mock: what they ask of their arguments, and the bytes that they write.

use std::path::Path;

/// A kernel that was loaded.
#[derive(Debug)]
pub struct Kernel {
    /// Its name.
    pub function: String,
    /// Bytes by the argument that points to where they go.
    pub stores: Vec<(usize, Vec<u8>)>,
    /// Bytes by the argument that points to them or is them.
    pub expects: Vec<(usize, Vec<u8>)>,
}

impl Kernel {
    /// Reads the text file at `path`; `None` where it is no kernel.
    pub fn read(path: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        let mut kernel = Self { function: String::new(), stores: Vec::new(), expects: Vec::new() };
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let bytes = |file: &str| std::fs::read(path.parent()?.join(file)).ok();
            match words[..] {
                ["function", name] => kernel.function = name.to_owned(),
                ["store", argument, file] => kernel.stores.push((argument.parse().ok()?, bytes(file)?)),
                ["expect", argument, file] => kernel.expects.push((argument.parse().ok()?, bytes(file)?)),
                _ => return None,
            }
        }
        (!kernel.function.is_empty()).then_some(kernel)
    }
}
