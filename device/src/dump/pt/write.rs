//! The writer of `.pt`: one contiguous tensor in an archive that `torch.load(weights_only=True)` takes, the same bytes for
//! the same tensor.

use std::io::{Cursor, Write as _};

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::globals::names;
use super::opcodes::op;
use crate::dump::Array;
use crate::dump::error::DumpFault;
use crate::dump::layout::{dense, elements};

/// Storages begin at multiples of this, as PyTorch's own do.
const ALIGNMENT: u16 = 64;

/// The bytes of the file.
pub(in crate::dump) fn encode(array: &Array) -> Result<Vec<u8>, DumpFault> {
    let pickle = pickle(array)?;
    let failed = |error: zip::result::ZipError| DumpFault::Archive(error.to_string());
    let mut zip = ZipWriter::new(Cursor::new(Vec::with_capacity(array.bytes.len() + 1024)));
    let stored = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Stored)
        .with_alignment(ALIGNMENT)
        .large_file(array.bytes.len() >= 1 << 31);
    let members: [(&str, &[u8]); 4] = [
        ("archive/data.pkl", &pickle),
        ("archive/byteorder", b"little"),
        ("archive/data/0", &array.bytes),
        ("archive/version", b"3\n"),
    ];
    for (name, bytes) in members {
        zip.start_file(name, stored).map_err(failed)?;
        zip.write_all(bytes)?;
    }
    Ok(zip.finish().map_err(failed)?.into_inner())
}

/// The pickle that makes the tensor of its storage, of protocol 2.
fn pickle(array: &Array) -> Result<Vec<u8>, DumpFault> {
    let Some((kind, storage)) = names(array.dtype) else {
        let advice = "PyTorch has no such type; write .safetensors";
        return Err(DumpFault::Unsupported { dtype: array.dtype.to_string(), format: ".pt", advice });
    };
    let count = elements("", &array.shape)?;
    let mut out = vec![op::PROTO, 2];
    let rebuild = if storage.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" };
    global(&mut out, "torch._utils", rebuild);
    out.extend([op::MARK, op::MARK]);
    text(&mut out, "storage");
    match storage {
        Some(storage) => global(&mut out, "torch", storage),
        None => global(&mut out, "torch.storage", "UntypedStorage"),
    }
    text(&mut out, "0");
    text(&mut out, "cpu");
    integer(&mut out, if storage.is_some() { count } else { array.bytes.len() });
    out.extend([op::TUPLE, op::BINPERSID]);
    integer(&mut out, 0);
    for sizes in [&array.shape, &dense(&array.shape, false)] {
        out.push(op::MARK);
        sizes.iter().for_each(|&size| integer(&mut out, size));
        out.push(op::TUPLE);
    }
    out.push(op::NEWFALSE);
    global(&mut out, "collections", "OrderedDict");
    out.extend([op::EMPTY_TUPLE, op::REDUCE]);
    if storage.is_none() {
        global(&mut out, "torch", kind);
    }
    out.extend([op::TUPLE, op::REDUCE, op::STOP]);
    Ok(out)
}

fn global(out: &mut Vec<u8>, module: &str, name: &str) {
    out.push(op::GLOBAL);
    for line in [module, name] {
        out.extend(line.as_bytes());
        out.push(b'\n');
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(op::BINUNICODE);
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn integer(out: &mut Vec<u8>, value: usize) {
    if let Ok(value) = u8::try_from(value) {
        out.extend([op::BININT1, value]);
    } else if let Ok(value) = i32::try_from(value) {
        out.push(op::BININT);
        out.extend(value.to_le_bytes());
    } else {
        // No tensor in memory has so many elements that the highest bit would be a sign.
        out.extend([op::LONG1, 8]);
        out.extend((value as u64).to_le_bytes());
    }
}
