//! What is written is read by the tools that it is written for: PyTorch under `weights_only=True`, and NumPy. The test
//! runs the interpreter that `ASSAY_PYTHON` names (else `python3`) and is skipped where that has no PyTorch.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use device::dump::{Array, ReadOptions, read, write_npy, write_pt};
use safetensors::Dtype;

/// Reads every `.pt` and `.npy` of a directory and writes each one's bits, and again as PyTorch and NumPy save them.
const SCRIPT: &str = r#"
import pathlib, sys
import numpy, torch
directory = pathlib.Path(sys.argv[1])
for path in sorted(directory.glob("*.pt")):
    tensor = torch.load(path, weights_only=True)
    raw = tensor.contiguous().reshape(-1)
    raw = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    (directory / (path.stem + ".torch.bits")).write_bytes(raw)
    (directory / (path.stem + ".torch.said")).write_text(f"{tensor.dtype} {list(tensor.shape)}")
    torch.save(tensor, directory / (path.stem + ".again"))
    torch.save(tensor, directory / (path.stem + ".legacy"), _use_new_zipfile_serialization=False)
for path in sorted(directory.glob("*.npy")):
    array = numpy.load(path, allow_pickle=False)
    (directory / (path.stem + ".numpy.bits")).write_bytes(array.tobytes())
    (directory / (path.stem + ".numpy.said")).write_text(f"{array.dtype.str} {list(array.shape)}")
"#;

const TYPES: [(Dtype, &str, Option<&str>); 19] = [
    (Dtype::BOOL, "torch.bool", Some("|b1")),
    (Dtype::U8, "torch.uint8", Some("|u1")),
    (Dtype::I8, "torch.int8", Some("|i1")),
    (Dtype::U16, "torch.uint16", Some("<u2")),
    (Dtype::I16, "torch.int16", Some("<i2")),
    (Dtype::U32, "torch.uint32", Some("<u4")),
    (Dtype::I32, "torch.int32", Some("<i4")),
    (Dtype::U64, "torch.uint64", Some("<u8")),
    (Dtype::I64, "torch.int64", Some("<i8")),
    (Dtype::F16, "torch.float16", Some("<f2")),
    (Dtype::BF16, "torch.bfloat16", Some("|V2")),
    (Dtype::F32, "torch.float32", Some("<f4")),
    (Dtype::F64, "torch.float64", Some("<f8")),
    (Dtype::C64, "torch.complex64", Some("<c8")),
    (Dtype::F8_E4M3, "torch.float8_e4m3fn", None),
    (Dtype::F8_E5M2, "torch.float8_e5m2", None),
    (Dtype::F8_E8M0, "torch.float8_e8m0fnu", None),
    (Dtype::F8_E4M3FNUZ, "torch.float8_e4m3fnuz", None),
    (Dtype::F8_E5M2FNUZ, "torch.float8_e5m2fnuz", None),
];

fn python(args: &[&str]) -> Option<std::process::Output> {
    let interpreter = std::env::var("ASSAY_PYTHON").ok().filter(|name| !name.is_empty());
    let mut command = Command::new(interpreter.as_deref().unwrap_or("python3"));
    command.args(args).stdin(Stdio::null()).output().ok()
}

#[test]
fn pytorch_and_numpy_read_what_is_written_and_the_other_way_round() {
    if !python(&["-c", "import torch, numpy"]).is_some_and(|output| output.status.success()) {
        eprintln!("skipped: no PyTorch; set ASSAY_PYTHON to an interpreter that has it");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut arrays = Vec::new();
    for (dtype, torch, numpy) in TYPES {
        for shape in [vec![], vec![0], vec![300], vec![3, 5, 2], vec![4, 0, 2], vec![1, 70_000]] {
            let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            // Every pattern of bits but for booleans, which have two.
            let byte = |at: usize| ((at * 2_654_435_761) >> 7) as u8;
            let byte = |at: usize| if dtype == Dtype::BOOL { byte(at) & 1 } else { byte(at) };
            let array = Array { dtype, shape, bytes: (0..length).map(byte).collect() };
            let name = format!("t{}", arrays.len());
            write_pt(&at(&format!("{name}.pt")), &array).unwrap();
            if numpy.is_some() {
                write_npy(&at(&format!("{name}.npy")), &array).unwrap();
            }
            arrays.push((name, array, torch, numpy));
        }
    }
    let script = python(&["-c", SCRIPT, dir.path().to_str().unwrap()]).unwrap();
    assert!(script.status.success(), "{}", String::from_utf8_lossy(&script.stderr));
    let text = |path: &Path| fs::read_to_string(path).unwrap();
    for (name, array, torch, numpy) in &arrays {
        assert_eq!(text(&at(&format!("{name}.torch.said"))), format!("{torch} {:?}", array.shape));
        assert!(fs::read(at(&format!("{name}.torch.bits"))).unwrap() == array.bytes, "{torch} {:?}", array.shape);
        for kind in ["again", "legacy"] {
            let dump = read(&at(&format!("{name}.{kind}")), &ReadOptions::default()).unwrap();
            assert!(dump.bare && dump.arrays[0].array == *array, "{kind}: {torch} {:?}", array.shape);
        }
        if let Some(numpy) = numpy {
            assert_eq!(text(&at(&format!("{name}.numpy.said"))), format!("{numpy} {:?}", array.shape));
            assert!(fs::read(at(&format!("{name}.numpy.bits"))).unwrap() == array.bytes, "{numpy} {:?}", array.shape);
        }
    }
}
