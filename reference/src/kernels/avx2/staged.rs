//! Weights that lie term by term, read in long runs and copied side by side.

use std::arch::x86_64::*;

use crate::kernels::aligned::Aligned;
use crate::kernels::sum::RUNS;

/// Terms of a product by columns that are staged together.
pub(super) const STAGED: usize = RUNS;
/// Bytes of a row that a block of columns holds.
pub(super) const LINE: usize = 32;
/// Bytes from one block of a [`Stage`] to the next: one more line than is used, so that blocks do not share cache sets.
const BLOCK_BYTES: usize = (STAGED + 1) * LINE;

/// Part of a weight matrix that lies term by term, copied out of it so that each run of 32 bytes lies beside that of
/// the next term. Rows are read in long runs, a few at a time, which is what memory is fast at.
pub(super) struct Stage {
    lines: Aligned<u8>,
}

impl Stage {
    /// Room for rows of `bytes`.
    pub(super) fn new(bytes: usize) -> Self {
        Self { lines: Aligned::zeros(bytes.div_ceil(LINE) * BLOCK_BYTES) }
    }

    /// Copies `terms` rows of `bytes` each; `row(k)` is where row `k` begins.
    ///
    /// # Safety
    /// `bytes` must be readable from every `row(0..terms)` on.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn fill(&mut self, terms: usize, bytes: usize, row: impl Fn(usize) -> *const u8) {
        assert!(terms <= STAGED && bytes.div_ceil(LINE) * BLOCK_BYTES <= self.lines.len());
        for first in (0..terms).step_by(4) {
            for block in 0..bytes / LINE {
                for k in first..terms.min(first + 4) {
                    // SAFETY: the line is inside the row and, as asserted above, inside `lines`.
                    unsafe {
                        let line = _mm256_loadu_si256(row(k).add(block * LINE).cast());
                        let to = self.lines.as_mut_ptr().add(block * BLOCK_BYTES + k * LINE);
                        _mm256_store_si256(to.cast(), line);
                    }
                }
            }
        }
        let (whole, rest) = (bytes / LINE, bytes % LINE);
        for k in 0..if rest > 0 { terms } else { 0 } {
            // SAFETY: the last bytes of the row.
            let last = unsafe { std::slice::from_raw_parts(row(k).add(whole * LINE), rest) };
            self.lines[whole * BLOCK_BYTES + k * LINE..][..rest].copy_from_slice(last);
        }
    }

    /// The lines of a block, 32 bytes a term.
    #[inline(always)]
    pub(super) fn block(&self, block: usize) -> &[u8] {
        &self.lines[block * BLOCK_BYTES..][..STAGED * LINE]
    }
}
