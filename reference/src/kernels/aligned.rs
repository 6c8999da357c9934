//! Buffers that begin at a cache line, so that vector loads of them never touch two.

use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};

/// A cache line.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A buffer of numbers, zero at first, that begins at a cache line.
#[derive(Clone, Debug)]
pub(super) struct Aligned<T> {
    lines: Vec<Line>,
    len: usize,
    of: std::marker::PhantomData<T>,
}

impl<T: Pod> Aligned<T> {
    /// `len` zeros.
    pub(super) fn zeros(len: usize) -> Self {
        let lines = (len * size_of::<T>()).div_ceil(size_of::<Line>());
        Self { lines: vec![Line::zeroed(); lines], len, of: std::marker::PhantomData }
    }

    /// The rows of `x`, each `depth` long, `stride` apart after `shift` zeros and filled up with zeros.
    pub(super) fn rows(x: &[T], depth: usize, shift: usize, stride: usize) -> Self {
        let mut out = Self::zeros(x.len() / depth.max(1) * stride);
        for (out, x) in out.chunks_exact_mut(stride.max(1)).zip(x.chunks_exact(depth.max(1))) {
            out[shift..shift + depth].copy_from_slice(x);
        }
        out
    }
}

impl<T: Pod> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &cast_slice(&self.lines)[..self.len]
    }
}

impl<T: Pod> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut cast_slice_mut(&mut self.lines)[..self.len]
    }
}
