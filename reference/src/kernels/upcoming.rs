//! What attention reads next, asked for in time: while one page of keys or values is computed with, the next ones are
//! prefetched, a few rows at each step, so that memory has work all the time.

use std::slice::{Chunks, Iter};

use half::bf16;

/// Values of a cache line.
const LINE: usize = 64 / size_of::<bf16>();

/// The keys and values of tokens in the order in which attention reads them: of each block of tokens the keys, then the
/// values.
#[derive(Clone, Debug)]
pub struct Upcoming<'a> {
    /// What is left of a block, and of the blocks.
    rows: Iter<'a, &'a [bf16]>,
    blocks: [Chunks<'a, &'a [bf16]>; 2],
    /// What is read after them.
    next: &'a [&'a [bf16]],
}

impl<'a> Upcoming<'a> {
    /// Blocks of `block` tokens, from the values of the first on: its keys are read at once. In the end `next`.
    #[must_use]
    pub fn new(keys: &'a [&'a [bf16]], values: &'a [&'a [bf16]], block: usize, next: &'a [&'a [bf16]]) -> Self {
        let [mut keys, values] = [keys, values].map(|rows| rows.chunks(block));
        keys.next();
        Self { rows: [].iter(), blocks: [values, keys], next }
    }

    /// Nothing.
    #[must_use]
    pub fn none() -> Self {
        Self::new(&[], &[], 1, &[])
    }

    /// Prefetches the next `count` rows, as far as there are any.
    #[inline(always)]
    pub fn fetch(&mut self, count: usize) {
        for _ in 0..count {
            let Some(row) = self.rows.next().or_else(|| self.next_block()) else { return };
            #[cfg(target_arch = "x86_64")]
            row.chunks(LINE).for_each(|line| super::avx2::prefetch(line.as_ptr()));
            #[cfg(not(target_arch = "x86_64"))]
            let _ = row;
        }
    }

    /// The first row of the next block.
    #[inline]
    fn next_block(&mut self) -> Option<&'a &'a [bf16]> {
        self.rows = self.blocks[0].next().unwrap_or_else(|| std::mem::take(&mut self.next)).iter();
        self.blocks.swap(0, 1);
        self.rows.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_in_the_order_in_which_attention_reads_them() {
        let rows = |first: u16| -> Vec<[bf16; 1]> { (first..first + 5).map(|i| [bf16::from_bits(i)]).collect() };
        let (keys, values, next) = (rows(0), rows(10), rows(20));
        let [keys, values, next] =
            [&keys, &values, &next].map(|rows| rows.iter().map(|row| &row[..]).collect::<Vec<_>>());
        let mut upcoming = Upcoming::new(&keys, &values, 2, &next);
        let mut order = Vec::new();
        while let Some(row) = upcoming.rows.next().or_else(|| upcoming.next_block()) {
            order.push(row[0].to_bits());
        }
        assert_eq!(order, [10, 11, 2, 3, 12, 13, 4, 14, 20, 21, 22, 23, 24]);
        upcoming.fetch(3);
        assert!(upcoming.next_block().is_none());
        Upcoming::none().fetch(1);
    }
}
