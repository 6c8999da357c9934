//! Where the elements of a tensor lie in the bytes of a file, checked once, and their copy in logical order.

use std::borrow::Cow;

use safetensors::Dtype;

use super::error::DumpFault;

/// Most dimensions of a tensor: as many as PyTorch and NumPy have.
pub(super) const MOST_DIMENSIONS: usize = 64;

/// Places of a tensor's elements, all of them inside the bytes that it was checked against.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    /// Byte of the first element.
    begin: usize,
    /// Elements between neighbours, dimension by dimension.
    strides: Vec<usize>,
    /// Whether elements are big-endian.
    big_endian: bool,
    /// Bytes of all elements in logical order.
    length: usize,
}

/// Bytes of one element, or why the type cannot be taken apart.
pub(super) fn element_size(tensor: &str, dtype: Dtype) -> Result<usize, DumpFault> {
    match dtype.bitsize() {
        bits if bits % 8 == 0 => Ok(bits / 8),
        _ => Err(DumpFault::Type {
            tensor: tensor.to_owned(),
            dtype: dtype.to_string(),
            why: "whose elements are smaller than a byte",
        }),
    }
}

/// Elements of a shape.
pub(super) fn elements(tensor: &str, shape: &[usize]) -> Result<usize, DumpFault> {
    if shape.len() > MOST_DIMENSIONS {
        let (rank, most) = (shape.len(), MOST_DIMENSIONS);
        return Err(DumpFault::Rank { tensor: tensor.to_owned(), rank, most });
    }
    if shape.contains(&0) {
        return Ok(0);
    }
    let product = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
    product.ok_or_else(|| DumpFault::Overflow { tensor: tensor.to_owned(), shape: shape.to_vec() })
}

/// Bytes that a tensor takes.
pub(super) fn length(tensor: &str, dtype: Dtype, shape: &[usize]) -> Result<usize, DumpFault> {
    let overflow = || DumpFault::Overflow { tensor: tensor.to_owned(), shape: shape.to_vec() };
    elements(tensor, shape)?.checked_mul(element_size(tensor, dtype)?).ok_or_else(overflow)
}

/// Strides of elements that follow one another, the last (or, column-major, the first) dimension fastest.
pub(super) fn dense(shape: &[usize], column_major: bool) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    let mut step = 1usize;
    let mut set = |dimension: usize| {
        if let (Some(stride), Some(&size)) = (strides.get_mut(dimension), shape.get(dimension)) {
            *stride = step;
            // Only an empty tensor can overflow here, and it has no element that a stride could lead to.
            step = step.saturating_mul(size.max(1));
        }
    };
    if column_major {
        (0..shape.len()).for_each(&mut set)
    } else {
        (0..shape.len()).rev().for_each(&mut set)
    }
    strides
}

impl Layout {
    /// Elements that follow one another from byte `begin` on, `held` bytes of them.
    pub fn dense(
        tensor: &str,
        dtype: Dtype,
        shape: &[usize],
        (begin, held): (usize, usize),
        (column_major, big_endian): (bool, bool),
    ) -> Result<Self, DumpFault> {
        let length = length(tensor, dtype, shape)?;
        if length != held {
            let (needed, held) = (length as u64, held as u64);
            return Err(DumpFault::Size { tensor: tensor.to_owned(), shape: shape.to_vec(), needed, held });
        }
        Ok(Self { begin, strides: dense(shape, column_major), big_endian, length })
    }

    /// Elements of a storage that lies at byte `begin` and holds `held` elements, `offset` of them before the first.
    pub fn strided(
        tensor: &str,
        dtype: Dtype,
        shape: &[usize],
        strides: &[usize],
        offset: usize,
        (begin, held): (usize, usize),
        big_endian: bool,
    ) -> Result<Self, DumpFault> {
        let (count, size) = (elements(tensor, shape)?, element_size(tensor, dtype)?);
        let length = length(tensor, dtype, shape)?;
        let beyond = || DumpFault::Beyond {
            tensor: tensor.to_owned(),
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            offset,
            held,
        };
        if strides.len() != shape.len() {
            return Err(beyond());
        }
        if count > 0 {
            let last = shape.iter().zip(strides).try_fold(offset, |last, (&size, &stride)| {
                size.saturating_sub(1).checked_mul(stride).and_then(|steps| last.checked_add(steps))
            });
            if last.is_none_or(|last| last >= held) {
                return Err(beyond());
            }
        } else if offset > held {
            return Err(beyond());
        }
        let begin = offset.checked_mul(size).and_then(|bytes| bytes.checked_add(begin)).ok_or_else(beyond)?;
        Ok(Self { begin, strides: strides.to_vec(), big_endian, length })
    }

    /// Bytes of all elements.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Whether the file holds the bytes as they are asked for.
    fn is_plain(&self, shape: &[usize], size: usize) -> bool {
        let dense = dense(shape, false);
        let in_order = shape.iter().zip(&self.strides).zip(&dense).all(|((&n, a), b)| n == 1 || a == b);
        in_order && (!self.big_endian || size == 1)
    }

    /// The elements in logical row-major order, little-endian: the file's own bytes where they are that.
    pub fn bytes<'a>(&self, file: &'a [u8], dtype: Dtype, shape: &[usize]) -> Cow<'a, [u8]> {
        let size = dtype.bitsize() / 8;
        if self.length == 0 {
            return Cow::Borrowed(&[]);
        }
        if self.is_plain(shape, size) {
            let end = self.begin.saturating_add(self.length);
            return Cow::Borrowed(file.get(self.begin..end).unwrap_or_default());
        }
        let file = file.get(self.begin..).unwrap_or_default();
        let mut out = match size {
            1 => self.gather::<1>(file, shape),
            2 => self.gather::<2>(file, shape),
            4 => self.gather::<4>(file, shape),
            _ => self.gather::<8>(file, shape),
        };
        if self.big_endian {
            // The halves of a complex number are numbers of their own.
            let part = if dtype == Dtype::C64 { 4 } else { size };
            out.chunks_exact_mut(part).for_each(<[u8]>::reverse);
        }
        Cow::Owned(out)
    }

    /// Copies elements of `N` bytes in logical order.
    fn gather<const N: usize>(&self, file: &[u8], shape: &[usize]) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.length);
        let (Some((&inner, outer)), Some((&step, steps))) = (shape.split_last(), self.strides.split_last()) else {
            out.extend(file.get(..N).unwrap_or_default());
            return out;
        };
        let mut index = vec![0usize; outer.len()];
        let mut at = 0usize;
        loop {
            let mut place = at.saturating_mul(N);
            let stride = step.saturating_mul(N);
            for _ in 0..inner {
                // Inside the file: the furthest element was checked when the layout was made.
                let element: [u8; N] = file.get(place..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N]);
                out.extend(element);
                place = place.saturating_add(stride);
            }
            // The next index of the outer dimensions, the last one fastest.
            let mut dimension = outer.len();
            loop {
                let Some(next) = dimension.checked_sub(1) else { return out };
                dimension = next;
                index[dimension] += 1;
                at += steps[dimension];
                if index[dimension] < outer[dimension] {
                    break;
                }
                at -= index[dimension] * steps[dimension];
                index[dimension] = 0;
            }
        }
    }
}
