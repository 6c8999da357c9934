//! A pickle read without running anything: a machine of the few operations that tensors, dicts, lists, tuples and scalars
//! take, under an allow-list of names. Whatever else a pickle asks for is refused by name before anything is made of it.
//! Every value lives in one table, so that no value is dropped or walked by recursion, and the tables are bounded.

use std::ops::Range;

use thiserror::Error;

use super::globals::{Global, lookup};
use super::opcodes::{self, op};

/// Most values that are no plain number at once; a tensor takes about ten.
const MOST_OBJECTS: usize = 1 << 18;
/// Most values on the stack.
const MOST_STACKED: usize = 1 << 18;
/// Most values that lists, tuples and dicts hold together.
const MOST_HELD: usize = 1 << 19;
/// Longest name or text.
const LONGEST_TEXT: usize = 1 << 16;

/// Why a pickle is refused.
#[derive(Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
#[non_exhaustive]
pub enum PickleFault {
    #[error(
        "pickle: byte {at} asks for `{name}`, which is not on the list of what may be made; only tensors, parameters, \
         dicts, lists, tuples and scalars are read, and nothing is ever called"
    )]
    Global { name: String, at: usize },
    #[error(
        "pickle: byte {at} is operation {name}, which no pickle of tensors needs; expected one written by torch.save"
    )]
    Opcode { name: String, at: usize },
    #[error("pickle: protocol {found} is not read; save with pickle_protocol 2, 3 or 4")]
    Protocol { found: u8 },
    #[error("pickle: ends at byte {at}, inside an operation; the file is cut short")]
    Ends { at: usize },
    #[error("pickle: byte {at} stores memo {index}, where {next} would be the next; indices with gaps are refused")]
    Sparse { index: u64, next: usize, at: usize },
    #[error("pickle: byte {at} uses memo {index}, which was never stored")]
    Unstored { index: u64, at: usize },
    #[error("pickle: holds more than {most} {what}, which no dump of tensors does")]
    Limit { what: &'static str, most: usize },
    #[error("pickle: byte {at}: {what}")]
    Malformed { what: &'static str, at: usize },
}

/// A value: a plain one, or the place of one that is not.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// An integer beyond 64 bits, by its bytes' place.
    Long(u32, u32),
    Float,
    /// Text, by its bytes' place.
    Text(u32, u32),
    Object(u32),
}

/// A value that is no plain one.
#[derive(Debug)]
pub(super) enum Object {
    Tuple(Vec<Value>),
    List(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    Global(Global),
    /// What a persistent id stands for: the tuple of it.
    Storage(Vec<Value>),
    /// The callable and arguments of a tensor.
    Tensor(Global, Vec<Value>),
}

/// A pickle that has been read.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    data: &'a [u8],
    objects: Vec<Object>,
    /// What it holds.
    pub root: Value,
    /// Byte after it.
    pub end: usize,
}

impl<'a> Pickle<'a> {
    /// Reads the pickle that begins at byte `at`.
    pub fn read(data: &'a [u8], at: usize) -> Result<Self, PickleFault> {
        // Places are kept in 32 bits.
        let most = u32::MAX as usize;
        let data = data.get(..data.len().min(most)).unwrap_or_default();
        let mut machine = Machine { data, at, ..Machine::default() };
        let root = machine.run()?;
        Ok(Self { data, objects: machine.objects, root, end: machine.at })
    }

    /// The object at a value.
    pub fn object(&self, value: Value) -> Option<&Object> {
        match value {
            Value::Object(id) => self.objects.get(id as usize),
            _ => None,
        }
    }

    /// The tuples of all persistent ids.
    pub fn storages(&self) -> impl Iterator<Item = &[Value]> {
        self.objects.iter().filter_map(|object| match object {
            Object::Storage(values) => Some(values.as_slice()),
            _ => None,
        })
    }

    /// The text at a value.
    pub fn text(&self, value: Value) -> Option<&'a str> {
        match value {
            Value::Text(begin, end) => std::str::from_utf8(self.data.get(begin as usize..end as usize)?).ok(),
            _ => None,
        }
    }

    /// The bytes of an integer beyond 64 bits.
    pub fn long(&self, value: Value) -> Option<&'a [u8]> {
        match value {
            Value::Long(begin, end) => self.data.get(begin as usize..end as usize),
            _ => None,
        }
    }

    /// A count or size.
    pub fn size(&self, value: Value) -> Option<usize> {
        match value {
            Value::Int(value) => usize::try_from(value).ok(),
            _ => None,
        }
    }

    /// The values of a tuple or list.
    pub fn sequence(&self, value: Value) -> Option<&[Value]> {
        match self.object(value)? {
            Object::Tuple(values) | Object::List(values) => Some(values),
            _ => None,
        }
    }

    /// The sizes of a tuple of them.
    pub fn sizes(&self, value: Value) -> Option<Vec<usize>> {
        self.sequence(value)?.iter().map(|&size| self.size(size)).collect()
    }
}

#[derive(Default)]
struct Machine<'a> {
    data: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    /// Heights of the stack at open marks.
    marks: Vec<usize>,
    memo: Vec<Value>,
    objects: Vec<Object>,
    held: usize,
}

impl Machine<'_> {
    fn run(&mut self) -> Result<Value, PickleFault> {
        loop {
            let at = self.at;
            let [code] = self.take::<1>()?;
            if code == op::STOP {
                let root = self.pop()?;
                if !self.stack.is_empty() || !self.marks.is_empty() {
                    return Err(PickleFault::Malformed { what: "ends with values that belong to nothing", at });
                }
                return Ok(root);
            }
            self.step(code, at)?;
            if self.stack.len() > MOST_STACKED || self.marks.len() > MOST_STACKED || self.memo.len() > MOST_OBJECTS {
                return Err(PickleFault::Limit { what: "values at once", most: MOST_STACKED });
            }
            if self.held > MOST_HELD {
                return Err(PickleFault::Limit { what: "values in lists and dicts", most: MOST_HELD });
            }
        }
    }

    fn step(&mut self, code: u8, at: usize) -> Result<(), PickleFault> {
        match code {
            op::PROTO => match self.take::<1>()? {
                [2..=4] => {}
                [found] => return Err(PickleFault::Protocol { found }),
            },
            op::FRAME => {
                let length = u64::from_le_bytes(self.take()?);
                if length > (self.data.len() - self.at) as u64 {
                    return Err(PickleFault::Ends { at: self.data.len() });
                }
            }
            op::MARK => self.marks.push(self.stack.len()),
            op::NONE => self.stack.push(Value::None),
            op::NEWTRUE => self.stack.push(Value::Bool(true)),
            op::NEWFALSE => self.stack.push(Value::Bool(false)),
            op::BININT => {
                let value = i32::from_le_bytes(self.take()?);
                self.stack.push(Value::Int(value.into()));
            }
            op::BININT1 => {
                let [value] = self.take()?;
                self.stack.push(Value::Int(value.into()));
            }
            op::BININT2 => {
                let value = u16::from_le_bytes(self.take()?);
                self.stack.push(Value::Int(value.into()));
            }
            op::LONG1 => {
                let [length] = self.take()?;
                self.long(length.into())?;
            }
            op::LONG4 => {
                let length = u32::from_le_bytes(self.take()?);
                self.long(length as usize)?;
            }
            op::BINFLOAT => {
                let _: [u8; 8] = self.take()?;
                self.stack.push(Value::Float);
            }
            op::BINUNICODE => {
                let length = u32::from_le_bytes(self.take()?);
                self.text(length.into(), at)?;
            }
            op::SHORT_BINUNICODE => {
                let [length] = self.take()?;
                self.text(length.into(), at)?;
            }
            op::BINUNICODE8 => {
                let length = u64::from_le_bytes(self.take()?);
                self.text(length, at)?;
            }
            op::EMPTY_TUPLE => self.make(Object::Tuple(Vec::new()))?,
            op::TUPLE1 => self.tuple(1)?,
            op::TUPLE2 => self.tuple(2)?,
            op::TUPLE3 => self.tuple(3)?,
            op::TUPLE => {
                let values = self.up_to_mark(at)?;
                self.held += values.len();
                self.make(Object::Tuple(values))?;
            }
            op::EMPTY_LIST => self.make(Object::List(Vec::new()))?,
            op::APPEND => {
                let value = self.pop()?;
                self.extend(&[value], at)?;
            }
            op::APPENDS => {
                let values = self.up_to_mark(at)?;
                self.extend(&values, at)?;
            }
            op::EMPTY_DICT => self.make(Object::Dict(Vec::new()))?,
            op::SETITEM => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.insert(&[key, value], at)?;
            }
            op::SETITEMS => {
                let values = self.up_to_mark(at)?;
                self.insert(&values, at)?;
            }
            op::GLOBAL => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module, name, at)?;
            }
            op::STACK_GLOBAL => {
                let (name, module) = (self.pop()?, self.pop()?);
                let place = |value| match value {
                    Value::Text(begin, end) => Ok(begin as usize..end as usize),
                    _ => Err(PickleFault::Malformed { what: "a name to look up is no text", at }),
                };
                self.global(place(module)?, place(name)?, at)?;
            }
            op::REDUCE => self.reduce(at)?,
            op::BUILD => {
                let _state = self.pop()?;
                // A state dict carries `_metadata` as an attribute of its dict. Nothing else may have attributes.
                match self.top(at)? {
                    Object::Dict(_) => {}
                    _ => return Err(PickleFault::Malformed { what: "sets attributes of what is no dict", at }),
                }
            }
            op::BINPERSID => {
                let id = self.pop()?;
                let values = match self.lookup(id) {
                    Some(Object::Tuple(values)) => values.clone(),
                    _ => return Err(PickleFault::Malformed { what: "a persistent id is no tuple", at }),
                };
                self.held += values.len();
                self.make(Object::Storage(values))?;
            }
            op::BINPUT => {
                let [index] = self.take()?;
                self.put(index.into(), at)?;
            }
            op::LONG_BINPUT => {
                let index = u32::from_le_bytes(self.take()?);
                self.put(index.into(), at)?;
            }
            op::MEMOIZE => self.put(self.memo.len() as u64, at)?,
            op::BINGET => {
                let [index] = self.take()?;
                self.get(index.into(), at)?;
            }
            op::LONG_BINGET => {
                let index = u32::from_le_bytes(self.take()?);
                self.get(index.into(), at)?;
            }
            other => return Err(PickleFault::Opcode { name: opcodes::name(other), at }),
        }
        Ok(())
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], PickleFault> {
        let bytes = self.data.get(self.at..).and_then(<[u8]>::first_chunk::<N>).copied();
        let bytes = bytes.ok_or(PickleFault::Ends { at: self.data.len() })?;
        self.at += N;
        Ok(bytes)
    }

    /// The next bytes' place.
    fn span(&mut self, length: u64) -> Result<Range<usize>, PickleFault> {
        if length > (self.data.len() - self.at) as u64 {
            return Err(PickleFault::Ends { at: self.data.len() });
        }
        let begin = self.at;
        self.at += length as usize;
        Ok(begin..self.at)
    }

    /// The place of the bytes up to a line feed.
    fn line(&mut self) -> Result<Range<usize>, PickleFault> {
        let rest = self.data.get(self.at..).unwrap_or_default();
        let rest = rest.get(..rest.len().min(LONGEST_TEXT)).unwrap_or_default();
        let length = rest.iter().position(|&byte| byte == b'\n').ok_or(PickleFault::Ends { at: self.data.len() })?;
        let place = self.at..self.at + length;
        self.at += length + 1;
        Ok(place)
    }

    fn long(&mut self, length: usize) -> Result<(), PickleFault> {
        let place = self.span(length as u64)?;
        let bytes = self.data.get(place.clone()).unwrap_or_default();
        self.stack.push(if length <= 8 {
            let negative = bytes.last().is_some_and(|&byte| byte >= 0x80);
            let mut wide = if negative { [0xFF; 8] } else { [0; 8] };
            for (to, from) in wide.iter_mut().zip(bytes) {
                *to = *from;
            }
            Value::Int(i64::from_le_bytes(wide))
        } else {
            Value::Long(place.start as u32, place.end as u32)
        });
        Ok(())
    }

    fn text(&mut self, length: u64, at: usize) -> Result<(), PickleFault> {
        let place = self.span(length)?;
        if place.len() > LONGEST_TEXT {
            return Err(PickleFault::Limit { what: "bytes of text in one piece", most: LONGEST_TEXT });
        }
        if std::str::from_utf8(self.data.get(place.clone()).unwrap_or_default()).is_err() {
            return Err(PickleFault::Malformed { what: "text is not UTF-8", at });
        }
        self.stack.push(Value::Text(place.start as u32, place.end as u32));
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, PickleFault> {
        let at = self.at;
        let floor = self.marks.last().copied().unwrap_or(0);
        let empty = PickleFault::Malformed { what: "takes a value where there is none", at };
        if self.stack.len() <= floor { Err(empty) } else { self.stack.pop().ok_or(empty) }
    }

    fn up_to_mark(&mut self, at: usize) -> Result<Vec<Value>, PickleFault> {
        let mark = self.marks.pop().ok_or(PickleFault::Malformed { what: "closes what was never opened", at })?;
        Ok(self.stack.drain(mark.min(self.stack.len())..).collect())
    }

    fn make(&mut self, object: Object) -> Result<(), PickleFault> {
        if self.objects.len() >= MOST_OBJECTS {
            return Err(PickleFault::Limit { what: "values", most: MOST_OBJECTS });
        }
        self.stack.push(Value::Object(self.objects.len() as u32));
        self.objects.push(object);
        Ok(())
    }

    fn tuple(&mut self, size: usize) -> Result<(), PickleFault> {
        let mut values = Vec::with_capacity(size);
        for _ in 0..size {
            values.push(self.pop()?);
        }
        values.reverse();
        self.held += size;
        self.make(Object::Tuple(values))
    }

    fn lookup(&self, value: Value) -> Option<&Object> {
        match value {
            Value::Object(id) => self.objects.get(id as usize),
            _ => None,
        }
    }

    /// The object on top of the stack.
    fn top(&mut self, at: usize) -> Result<&mut Object, PickleFault> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let missing = PickleFault::Malformed { what: "changes a value where there is none", at };
        match self.stack.get(floor..).and_then(<[Value]>::last) {
            Some(&Value::Object(id)) => self.objects.get_mut(id as usize).ok_or(missing),
            _ => Err(missing),
        }
    }

    fn extend(&mut self, values: &[Value], at: usize) -> Result<(), PickleFault> {
        self.held += values.len();
        match self.top(at)? {
            Object::List(list) => list.extend(values),
            _ => return Err(PickleFault::Malformed { what: "appends to what is no list", at }),
        }
        Ok(())
    }

    fn insert(&mut self, values: &[Value], at: usize) -> Result<(), PickleFault> {
        self.held += values.len();
        let (pairs, []) = values.as_chunks::<2>() else {
            return Err(PickleFault::Malformed { what: "sets a key without a value", at });
        };
        match self.top(at)? {
            Object::Dict(dict) => dict.extend(pairs.iter().map(|&[key, value]| (key, value))),
            _ => return Err(PickleFault::Malformed { what: "sets items of what is no dict", at }),
        }
        Ok(())
    }

    fn global(&mut self, module: Range<usize>, name: Range<usize>, at: usize) -> Result<(), PickleFault> {
        let text = |place| String::from_utf8_lossy(self.data.get(place).unwrap_or_default());
        let (module, name) = (text(module), text(name));
        match lookup(&module, &name) {
            Some(global) => self.make(Object::Global(global)),
            None => {
                let clipped: String = format!("{module}.{name}").chars().take(200).collect();
                Err(PickleFault::Global { name: clipped, at })
            }
        }
    }

    fn reduce(&mut self, at: usize) -> Result<(), PickleFault> {
        let (arguments, callable) = (self.pop()?, self.pop()?);
        let global = match self.lookup(callable) {
            Some(&Object::Global(global)) => global,
            _ => return Err(PickleFault::Malformed { what: "calls what is no name", at }),
        };
        let values = match self.lookup(arguments) {
            Some(Object::Tuple(values)) => values.clone(),
            _ => return Err(PickleFault::Malformed { what: "calls with what is no tuple", at }),
        };
        match (global, values.as_slice()) {
            (Global::OrderedDict, []) => self.make(Object::Dict(Vec::new())),
            (Global::OrderedDict, _) => {
                Err(PickleFault::Malformed { what: "makes an OrderedDict of what is given; expected an empty one", at })
            }
            (Global::Size, &[Value::Object(id)]) => {
                self.stack.push(Value::Object(id));
                Ok(())
            }
            (Global::RebuildTensor2 | Global::RebuildTensor3 | Global::RebuildParameter, _) => {
                self.held += values.len();
                self.make(Object::Tensor(global, values))
            }
            _ => Err(PickleFault::Malformed { what: "calls what is no function, or with the wrong arguments", at }),
        }
    }

    fn put(&mut self, index: u64, at: usize) -> Result<(), PickleFault> {
        let next = self.memo.len();
        let value = self.stack.last().copied();
        let value = value.ok_or(PickleFault::Malformed { what: "stores a value where there is none", at })?;
        match usize::try_from(index) {
            Ok(index) if index == next => self.memo.push(value),
            Ok(index) if index < next => {
                if let Some(place) = self.memo.get_mut(index) {
                    *place = value;
                }
            }
            _ => return Err(PickleFault::Sparse { index, next, at }),
        }
        Ok(())
    }

    fn get(&mut self, index: u64, at: usize) -> Result<(), PickleFault> {
        let value = usize::try_from(index).ok().and_then(|index| self.memo.get(index)).copied();
        self.stack.push(value.ok_or(PickleFault::Unstored { index, at })?);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
