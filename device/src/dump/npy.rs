//! NumPy's `.npy`: a magic number, a version, a header that is a Python dict, and the elements.

use safetensors::Dtype;

use super::error::DumpFault;
use super::layout::{Layout, length};
use super::open::{Blob, Found, Stored};
use super::{Array, Format, ReadOptions};

/// What a file begins with.
pub(super) const MAGIC: &[u8] = b"\x93NUMPY";

/// Longest header read; a plain array's is about a hundred bytes.
const LONGEST_HEADER: usize = 1 << 16;

/// What a header says.
#[derive(Debug, PartialEq, Eq)]
struct Header {
    descr: String,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// Finds the tensor of a `.npy` file.
pub(super) fn find(blob: Blob, stem: &str, options: &ReadOptions) -> Result<Found, DumpFault> {
    let length = blob.bytes().len();
    let tensor = member(blob.bytes(), (0, length), stem, options)?;
    let tensor = tensor.place(0);
    Ok(Found { bare: true, tensors: vec![tensor], ..Found::new(Format::Npy, vec![blob]) })
}

/// An array whose header has been read.
pub(super) struct Read {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    layout: Layout,
}

impl Read {
    /// The same as a tensor in a blob.
    pub fn place(self, blob: usize) -> Stored {
        Stored::new(self.name, self.dtype, self.shape, blob, self.layout)
    }
}

/// Reads the array that lies in some bytes of a file.
pub(super) fn member(
    file: &[u8],
    (begin, size): (usize, usize),
    name: &str,
    options: &ReadOptions,
) -> Result<Read, DumpFault> {
    let refused = |what: String| DumpFault::Npy(what);
    let bytes = file.get(begin..).and_then(|rest| rest.get(..size)).unwrap_or_default();
    let (text, data) = split(bytes).map_err(refused)?;
    let header = parse(text).map_err(|what| refused(format!("header: {what}")))?;
    let (dtype, big_endian) = dtype(&header.descr, options)?;
    let (at, held) = (begin + (size - data.len()), data.len());
    let layout = Layout::dense(name, dtype, &header.shape, (at, held), (header.fortran_order, big_endian))?;
    Ok(Read { name: name.to_owned(), dtype, shape: header.shape, layout })
}

/// The header's text and the data behind it.
fn split(bytes: &[u8]) -> Result<(&str, &[u8]), String> {
    let cut = || format!("is {} bytes long, which ends inside the header: the file is cut short", bytes.len());
    let rest = bytes.strip_prefix(MAGIC).ok_or("does not begin with \\x93NUMPY")?;
    let (version, rest) = rest.split_first_chunk::<2>().ok_or_else(cut)?;
    let (length, rest) = match version {
        [1, 0] => {
            let (length, rest) = rest.split_first_chunk().ok_or_else(cut)?;
            (usize::from(u16::from_le_bytes(*length)), rest)
        }
        [2 | 3, 0] => {
            let (length, rest) = rest.split_first_chunk().ok_or_else(cut)?;
            (u32::from_le_bytes(*length) as usize, rest)
        }
        [major, minor] => return Err(format!("is of version {major}.{minor}; expected 1.0, 2.0 or 3.0")),
    };
    if length > LONGEST_HEADER {
        return Err(format!("header length is {length}, more than the {LONGEST_HEADER} bytes that one may need"));
    }
    let (text, data) = rest.split_at_checked(length).ok_or_else(cut)?;
    Ok((std::str::from_utf8(text).map_err(|_| "header is not UTF-8")?, data))
}

/// Element type and whether it is big-endian.
fn dtype(descr: &str, options: &ReadOptions) -> Result<(Dtype, bool), DumpFault> {
    let unknown = || {
        DumpFault::Npy(format!(
            "descr is {descr:?}; expected a plain number type, as '<f4', '|i1' or '>i8' (objects and structures are \
             not read)"
        ))
    };
    let mut characters = descr.chars();
    let big_endian = match characters.next() {
        Some('<' | '|') => false,
        Some('>') => true,
        _ => return Err(unknown()),
    };
    let dtype = match characters.as_str() {
        "V2" if options.bf16 && !big_endian => Dtype::BF16,
        "V2" => return Err(DumpFault::Void(descr.to_owned())),
        // The other form in which BF16 reaches NumPy: its bits as integers.
        "u2" if options.bf16 => Dtype::BF16,
        "b1" => Dtype::BOOL,
        "i1" => Dtype::I8,
        "i2" => Dtype::I16,
        "i4" => Dtype::I32,
        "i8" => Dtype::I64,
        "u1" => Dtype::U8,
        "u2" => Dtype::U16,
        "u4" => Dtype::U32,
        "u8" => Dtype::U64,
        "f2" => Dtype::F16,
        "f4" => Dtype::F32,
        "f8" => Dtype::F64,
        "c8" => Dtype::C64,
        _ => return Err(unknown()),
    };
    Ok((dtype, big_endian))
}

/// The dict of the header: three keys, each once, and nothing else.
fn parse(text: &str) -> Result<Header, String> {
    let mut at = Literal { text: text.as_bytes(), at: 0 };
    let (mut descr, mut fortran_order, mut shape) = (None, None, None);
    at.expect(b'{')?;
    while !at.takes(b'}') {
        let key = at.string()?;
        at.expect(b':')?;
        let twice = match key.as_str() {
            "descr" => descr.replace(at.descr()?).is_some(),
            "fortran_order" => fortran_order.replace(at.boolean()?).is_some(),
            "shape" => shape.replace(at.shape()?).is_some(),
            _ => return Err(format!("has key {key:?}; expected descr, fortran_order and shape")),
        };
        if twice {
            return Err(format!("has key {key:?} twice"));
        }
        if !at.takes(b',') {
            at.expect(b'}')?;
            break;
        }
    }
    at.end()?;
    let lacks = |key: &str| format!("lacks {key}; expected descr, fortran_order and shape");
    Ok(Header {
        descr: descr.ok_or_else(|| lacks("descr"))?,
        fortran_order: fortran_order.ok_or_else(|| lacks("fortran_order"))?,
        shape: shape.ok_or_else(|| lacks("shape"))?,
    })
}

/// A place in the text of a Python literal.
struct Literal<'a> {
    text: &'a [u8],
    at: usize,
}

impl Literal<'_> {
    fn skip(&mut self) {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
    }

    fn peek(&mut self) -> Option<u8> {
        self.skip();
        self.text.get(self.at).copied()
    }

    fn takes(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8) -> Result<(), String> {
        if self.takes(byte) { Ok(()) } else { Err(format!("expected '{}' at byte {}", char::from(byte), self.at)) }
    }

    fn end(&mut self) -> Result<(), String> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(format!("has something behind the dict, at byte {}", self.at)),
        }
    }

    fn string(&mut self) -> Result<String, String> {
        let quote = match self.peek() {
            Some(quote @ (b'\'' | b'"')) => quote,
            _ => return Err(format!("expected a string at byte {}", self.at)),
        };
        self.at += 1;
        let rest = self.text.get(self.at..).unwrap_or_default();
        let length = rest.iter().position(|&byte| byte == quote).ok_or("has a string without an end")?;
        let string = rest.get(..length).unwrap_or_default();
        self.at += length + 1;
        if string.contains(&b'\\') {
            return Err("has an escape in a string".into());
        }
        Ok(String::from_utf8_lossy(string).into_owned())
    }

    fn descr(&mut self) -> Result<String, String> {
        match self.peek() {
            Some(b'[') => Err("descr is a structure of fields; expected a plain number type".into()),
            _ => self.string(),
        }
    }

    fn word(&mut self) -> &[u8] {
        self.skip();
        let rest = self.text.get(self.at..).unwrap_or_default();
        let length = rest.iter().take_while(|byte| byte.is_ascii_alphanumeric()).count();
        self.at += length;
        rest.get(..length).unwrap_or_default()
    }

    fn boolean(&mut self) -> Result<bool, String> {
        let at = self.at;
        match self.word() {
            b"True" => Ok(true),
            b"False" => Ok(false),
            _ => Err(format!("fortran_order is neither True nor False, at byte {at}")),
        }
    }

    fn shape(&mut self) -> Result<Vec<usize>, String> {
        let mut shape = Vec::new();
        self.expect(b'(')?;
        while !self.takes(b')') {
            let word = String::from_utf8_lossy(self.word()).into_owned();
            // Python 2 wrote long integers with their letter.
            let digits = word.strip_suffix('L').unwrap_or(&word);
            let size = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
            shape.push(size.ok_or_else(|| format!("shape has size {word:?}; expected whole numbers below 2^64"))?);
            if !self.takes(b',') {
                self.expect(b')')?;
                break;
            }
        }
        Ok(shape)
    }
}

/// The bytes of a `.npy` file up to its elements.
pub(super) fn encode_header(array: &Array) -> Result<Vec<u8>, DumpFault> {
    length("", array.dtype, &array.shape)?;
    let descr = match array.dtype {
        Dtype::BOOL => "|b1",
        Dtype::U8 => "|u1",
        Dtype::I8 => "|i1",
        Dtype::U16 => "<u2",
        Dtype::I16 => "<i2",
        Dtype::U32 => "<u4",
        Dtype::I32 => "<i4",
        Dtype::U64 => "<u8",
        Dtype::I64 => "<i8",
        Dtype::F16 => "<f2",
        Dtype::BF16 => "<V2",
        Dtype::F32 => "<f4",
        Dtype::F64 => "<f8",
        Dtype::C64 => "<c8",
        other => {
            let advice = "NumPy has no such type; write .pt or .safetensors";
            return Err(DumpFault::Unsupported { dtype: other.to_string(), format: ".npy", advice });
        }
    };
    let sizes: Vec<String> = array.shape.iter().map(usize::to_string).collect();
    let comma = if sizes.len() == 1 { "," } else { "" };
    let shape = format!("({}{comma})", sizes.join(", "));
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    // Data begin at a multiple of 64 bytes, behind a line feed.
    let before = MAGIC.len() + 4;
    let padded = (before + text.len() + 1).next_multiple_of(64) - before;
    text.extend(std::iter::repeat_n(' ', padded - 1 - text.len()));
    text.push('\n');
    let size =
        u16::try_from(text.len()).map_err(|_| DumpFault::Npy("header would be longer than 65,535 bytes".into()))?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    bytes.extend(size.to_le_bytes());
    bytes.extend(text.as_bytes());
    Ok(bytes)
}

#[cfg(test)]
mod tests;
