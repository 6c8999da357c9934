//! Weights that lie term by term, read in long runs and copied side by side.

use std::arch::x86_64::*;

use crate::kernels::aligned::Aligned;
use crate::kernels::avx2::prefetch;
use crate::kernels::sum::{LANES, RUNS};

/// Terms of a product by columns that are staged together.
pub(super) const STAGED: usize = RUNS;
/// Bytes that are staged together: as many again are prefetched, and both should stay in a core's own cache.
const STAGE_BYTES: usize = 384 << 10;

/// Terms to stage of rows of `bytes`: whole groups of four and whole rounds of the lanes.
pub(super) fn staged_terms(bytes: usize) -> usize {
    (STAGE_BYTES / bytes / LANES * LANES).clamp(2 * LANES, STAGED)
}

/// Part of a weight matrix that lies term by term, copied out of it so that each run of 64 bytes lies beside that of
/// the next term. Rows are read in long runs, a few at a time, which is what memory is fast at; reading 64 bytes of
/// one row after the other is several times slower.
pub(in crate::kernels) struct Stage {
    /// `[block][most + 1]` lines: one more than is used, so that blocks do not share cache sets.
    lines: Aligned<u8>,
    /// Terms at most.
    most: usize,
}

impl Stage {
    /// Room for `most` rows of `bytes`.
    pub(in crate::kernels) fn new(bytes: usize, most: usize) -> Self {
        Self { lines: Aligned::zeros(bytes.div_ceil(64) * (most + 1) * 64), most }
    }

    /// Bytes from one block to the next.
    #[inline(always)]
    fn block_bytes(&self) -> usize {
        (self.most + 1) * 64
    }

    /// Copies `terms` rows of `bytes` each; `row(k)` is where row `k` begins.
    ///
    /// # Safety
    /// `bytes` must be readable from every `row(0..terms)` on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(in crate::kernels) unsafe fn fill(&mut self, terms: usize, bytes: usize, row: impl Fn(usize) -> *const u8) {
        let block_bytes = self.block_bytes();
        assert!(terms <= self.most && bytes.div_ceil(64) * block_bytes <= self.lines.len());
        for first in (0..terms).step_by(4) {
            for block in 0..bytes.div_ceil(64) {
                let mask = u64::MAX >> (64 - (bytes - block * 64).min(64));
                for k in first..terms.min(first + 4) {
                    // SAFETY: the mask leaves only bytes of the row; the line is inside `lines`, as asserted above.
                    unsafe {
                        let line = _mm512_maskz_loadu_epi8(mask, row(k).add(block * 64).cast());
                        let to = self.lines.as_mut_ptr().add(block * block_bytes + k * 64);
                        _mm512_storeu_si512(to.cast(), line);
                    }
                }
            }
        }
    }

    /// The lines of a block, 64 bytes a term.
    #[inline(always)]
    pub(in crate::kernels) fn block(&self, block: usize) -> &[u8] {
        &self.lines[block * self.block_bytes()..][..self.most * 64]
    }
}

/// The lines of rows that are staged next, to be prefetched one by one while others are computed with.
pub(in crate::kernels) struct Ahead {
    line: *const u8,
    /// Lines of a row, and those left of the present one.
    lines: usize,
    rest: usize,
    /// Bytes from the end of a row's part to the start of the next one's.
    gap: isize,
    left: usize,
}

impl Ahead {
    /// `terms` rows of `bytes` from `first` on, `stride` bytes apart.
    pub(in crate::kernels) fn new(first: *const u8, stride: isize, terms: usize, bytes: usize) -> Self {
        let lines = bytes.div_ceil(64);
        Self { line: first, lines, rest: lines, gap: stride - 64 * lines as isize, left: terms * lines }
    }

    /// Prefetches the next `count` lines.
    #[inline(always)]
    pub(in crate::kernels) fn go(&mut self, count: usize) {
        for _ in 0..count.min(self.left) {
            prefetch(self.line);
            self.line = self.line.wrapping_add(64);
            self.rest -= 1;
            if self.rest == 0 {
                self.line = self.line.wrapping_offset(self.gap);
                self.rest = self.lines;
            }
            self.left -= 1;
        }
    }
}
