//! Buffers between guards. On both sides of what a kernel is given lies a margin of known bytes, at least a row of the
//! tensor wide, and what it is to write holds a value that no arithmetic gives: so writes outside and elements never
//! written show in the bytes, whatever the kernel computes.

use reference::DType;

/// Boundary at which data begins: devices move memory in blocks of this many bytes at most.
const ALIGNMENT: usize = 512;
/// Narrowest and widest margin.
const NARROWEST: usize = 4096;
const WIDEST: usize = 1 << 20;
/// Bytes of a stray write that are shown.
const SHOWN: usize = 8;
/// Rows of a tensor that are named.
const NAMED: usize = 16;

/// What a guarded buffer holds before a launch.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// What no arithmetic gives.
    Poison,
    /// Anything, as in memory that nobody cleared; it is no number.
    Junk,
    /// Zeros.
    Zeros,
}

/// A buffer between margins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Guarded {
    pub name: String,
    /// Elements a row; a row of something that is no tensor is all of it.
    pub columns: usize,
    /// Bytes of an element.
    pub element: usize,
    /// Bytes between the margins.
    pub data: usize,
    /// Bytes of the margin before the data.
    pub margin: usize,
}

/// Where a write went that was none of the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Before the tensor's first byte.
    Before,
    /// Behind its last byte.
    After,
    /// Into a tensor that the kernel only reads.
    Inside,
}

/// A write where the kernel must not write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stray {
    /// The tensor, or which workspace.
    pub tensor: String,
    /// Where.
    pub side: Side,
    /// Bytes from the tensor's beginning to the nearest that was changed before it, from its end to the nearest behind
    /// it, or from its beginning to the first inside it.
    pub offset: usize,
    /// Bytes that were changed on this side.
    pub bytes: usize,
    /// The first few bytes there, from the lowest that was changed on.
    pub found: Vec<u8>,
    /// The launch, from 1.
    pub launch: usize,
}

/// Elements that the kernel never wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unwritten {
    /// The tensor.
    pub tensor: String,
    /// How many.
    pub elements: u64,
    /// Of so many.
    pub of: u64,
    /// The first, `[row, column]`.
    pub first: [usize; 2],
    /// Rows that hold one, the first few.
    pub rows: Vec<usize>,
    /// The launch, from 1.
    pub launch: usize,
}

/// A pattern for BF16 and FP32: a signalling NaN of either, which no arithmetic gives and copies keep.
const NAN: [u8; 2] = [0xa5, 0xff];
/// For INT8: -128, which is no code of the contract.
const CODE: u8 = 0x80;

impl Guarded {
    /// A tensor, or any other list of rows.
    pub fn tensor(name: &str, [rows, columns]: [usize; 2], dtype: DType) -> Self {
        Self::sized(name, columns, dtype.size(), rows * columns * dtype.size())
    }

    /// Memory without a shape.
    pub fn plain(name: &str, bytes: usize) -> Self {
        Self::sized(name, bytes, 1, bytes)
    }

    fn sized(name: &str, columns: usize, element: usize, data: usize) -> Self {
        let row = (columns * element).clamp(NARROWEST, WIDEST);
        Self { name: name.to_owned(), columns, element, data, margin: row.next_multiple_of(ALIGNMENT) }
    }

    /// Bytes with both margins.
    pub fn bytes(&self) -> usize {
        self.data + 2 * self.margin
    }

    /// What is copied to the device before a launch.
    pub fn image(&self, content: Content<'_>) -> Vec<u8> {
        let mut image: Vec<u8> = (0..self.bytes()).map(margin_byte).collect();
        let data = &mut image[self.margin..self.margin + self.data];
        match content {
            Content::Bytes(bytes) => data.iter_mut().zip(bytes).for_each(|(to, &from)| *to = from),
            Content::Poison if self.element == 1 => data.fill(CODE),
            Content::Poison | Content::Junk => {
                data.iter_mut().zip(NAN.iter().cycle()).for_each(|(to, &from)| *to = from)
            }
            Content::Zeros => data.fill(0),
        }
        image
    }

    /// The data in an image.
    pub fn data<'i>(&self, image: &'i [u8]) -> &'i [u8] {
        image.get(self.margin..self.margin + self.data).unwrap_or_default()
    }

    /// Writes outside the data, and inside where `kept` is what a kernel that only reads left there.
    pub fn strays(&self, image: &[u8], kept: Option<&[u8]>, launch: usize) -> Vec<Stray> {
        let end = self.margin + self.data;
        let stray = |side, range: std::ops::Range<usize>, expected: &dyn Fn(usize) -> u8| {
            let changed = |&at: &usize| image.get(at).is_some_and(|&byte| byte != expected(at));
            let mut places = range.filter(changed);
            let first = places.next()?;
            let (bytes, last) = places.fold((1, first), |(count, _), at| (count + 1, at));
            let offset = match side {
                Side::Before => self.margin - last,
                Side::After => first - end,
                Side::Inside => first - self.margin,
            };
            let found = image.iter().skip(first).take(SHOWN.min(last + 1 - first)).copied().collect();
            Some(Stray { tensor: self.name.clone(), side, offset, bytes, found, launch })
        };
        let before = stray(Side::Before, 0..self.margin, &margin_byte);
        let inside = kept.filter(|kept| *kept != self.data(image)).and_then(|kept| {
            stray(Side::Inside, self.margin..end, &|at| kept.get(at - self.margin).copied().unwrap_or_default())
        });
        let after = stray(Side::After, end..self.bytes(), &margin_byte);
        [before, inside, after].into_iter().flatten().collect()
    }

    /// Elements that still hold what they held before the launch.
    pub fn unwritten(&self, image: &[u8], launch: usize) -> Option<Unwritten> {
        let poison: Vec<u8> =
            if self.element == 1 { vec![CODE] } else { NAN.iter().cycle().take(self.element).copied().collect() };
        let elements = self.data(image).chunks_exact(self.element).enumerate();
        let mut places = elements.filter(|(_, bytes)| *bytes == poison).map(|(index, _)| index);
        let first = places.next()?;
        let (mut rows, mut count) = (vec![first / self.columns], 1);
        for place in places {
            count += 1;
            let row = place / self.columns;
            if rows.last() != Some(&row) && rows.len() < NAMED {
                rows.push(row);
            }
        }
        let of = (self.data / self.element) as u64;
        let first = [first / self.columns, first % self.columns];
        Some(Unwritten { tensor: self.name.clone(), elements: count, of, first, rows, launch })
    }
}

/// The byte at a place of a margin: neighbours differ, so that a block copied over it shows too.
fn margin_byte(at: usize) -> u8 {
    (at as u8).wrapping_mul(37) ^ 0x5a
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn poison_is_what_no_arithmetic_gives() {
        let bits = u16::from_le_bytes(NAN);
        let signals = |quiet: u32, bits: u32| bits & quiet == 0;
        assert!(half::bf16::from_bits(bits).is_nan() && signals(1 << 6, u32::from(bits)));
        let bits = u32::from_le_bytes([NAN[0], NAN[1], NAN[0], NAN[1]]);
        assert!(f32::from_bits(bits).is_nan() && signals(1 << 22, bits));
        assert_eq!(CODE as i8, i8::MIN);
    }

    #[test]
    fn a_margin_holds_a_row_and_keeps_data_aligned() {
        for (columns, dtype) in [(1, DType::F32), (5120, DType::Bf16), (17_408, DType::F32), (1 << 24, DType::I8)] {
            let guarded = Guarded::tensor("t", [16, columns], dtype);
            assert_eq!(guarded.margin % ALIGNMENT, 0);
            assert!(guarded.margin >= (columns * dtype.size()).min(WIDEST), "{guarded:?}");
        }
    }

    #[test]
    fn what_is_untouched_is_no_finding() {
        let guarded = Guarded::tensor("t", [2, 3], DType::F32);
        let bytes: Vec<u8> = (0..24).collect();
        let image = guarded.image(Content::Bytes(&bytes));
        assert_eq!(guarded.strays(&image, Some(&bytes), 1), []);
        assert_eq!(guarded.unwritten(&image, 1), None);
        assert_eq!(guarded.data(&image), bytes);
    }

    #[test]
    fn what_was_never_written_is_named() {
        for dtype in [DType::I8, DType::Bf16, DType::F32] {
            let guarded = Guarded::tensor("t", [4, 6], dtype);
            let mut image = guarded.image(Content::Poison);
            let (start, row) = (guarded.margin, 6 * dtype.size());
            image[start..start + row].fill(0);
            image[start + 3 * row..start + 4 * row].fill(0);
            let found = guarded.unwritten(&image, 2).unwrap();
            assert_eq!((found.elements, found.of, found.first, found.rows), (12, 24, [1, 0], vec![1, 2]));
        }
    }

    proptest! {
        #[test]
        fn a_write_anywhere_outside_is_found_where_it_is(
            rows in 1usize..5, columns in 1usize..40, place in any::<prop::sample::Index>(), length in 1usize..9,
        ) {
            let guarded = Guarded::tensor("t", [rows, columns], DType::Bf16);
            let mut image = guarded.image(Content::Poison);
            let at = place.index(guarded.margin - length);
            for (side, start) in [(Side::Before, 0), (Side::After, guarded.margin + guarded.data)] {
                let before = image.clone();
                image[start + at..start + at + length].iter_mut().for_each(|byte| *byte ^= 0xff);
                let found = guarded.strays(&image, None, 3);
                prop_assert_eq!(found.len(), 1);
                let offset = if side == Side::Before { guarded.margin - (at + length - 1) } else { at };
                prop_assert_eq!((found[0].side, found[0].offset, found[0].bytes), (side, offset, length));
                prop_assert_eq!(found[0].launch, 3);
                prop_assert_eq!(&found[0].found, &image[start + at..start + at + length]);
                image = before;
            }
        }

        #[test]
        fn a_write_into_what_is_read_is_found(place in 0usize..48, byte in 1u8..) {
            let guarded = Guarded::tensor("t", [3, 4], DType::F32);
            let kept = vec![7; 48];
            let mut image = guarded.image(Content::Bytes(&kept));
            image[guarded.margin + place] ^= byte;
            let found = guarded.strays(&image, Some(&kept), 1);
            prop_assert_eq!((found[0].side, found[0].offset, found[0].bytes), (Side::Inside, place, 1));
        }
    }
}
