//! The buffers of tunnels. A tunnel owns one only while bytes wait to be written.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Read size of a tunnel: a WebSocket message of 64 KiB with its header in one call.
const LARGE_BYTES: usize = 128 * 1024;

/// Read size once too many large buffers are held by peers that read slowly.
const SMALL_BYTES: usize = 8 * 1024;

/// Alignment of a buffer: a cache line. `recv` of 64 KiB into memory with the allocator's
/// alignment of 16 bytes took four times as long on the tested machines.
const ALIGNMENT: usize = 64;

/// Most large buffers that the tunnels of one thread hold at a time: 32 MiB.
const MAX_LARGE_HELD: usize = 256;

/// Most free large buffers that a thread keeps. Tunnels that drain at once need one or two.
const MAX_LARGE_FREE: usize = 16;

thread_local! {
    static FREE: RefCell<FreeBuffers> = RefCell::default();
}

/// The buffers of one thread.
#[derive(Default)]
struct FreeBuffers {
    free: Vec<Box<[u8]>>,
    /// Counted by the buffers: a task may drop one on another thread.
    held: Arc<AtomicUsize>,
}

/// A buffer; dropping it makes it free again.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Box<[u8]>,
    /// For a large one: the count of the thread that it was taken on.
    held: Option<Arc<AtomicUsize>>,
    /// The aligned part of the memory.
    range: Range<usize>,
}

impl Buffer {
    /// A buffer with the content of an earlier user.
    pub(crate) fn take() -> Self {
        let large = FREE.with_borrow_mut(|buffers| {
            if buffers.held.load(Ordering::Relaxed) >= MAX_LARGE_HELD {
                return None;
            }
            buffers.held.fetch_add(1, Ordering::Relaxed);
            let memory = buffers.free.pop();
            let memory = memory.unwrap_or_else(|| allocate(LARGE_BYTES));
            Some((memory, Arc::clone(&buffers.held)))
        });
        let (memory, held) = match large {
            Some((memory, held)) => (memory, Some(held)),
            None => (allocate(SMALL_BYTES), None),
        };
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT - 1);
        let range = start..start + memory.len() - (ALIGNMENT - 1);
        Self {
            memory,
            held,
            range,
        }
    }
}

/// Memory with room for this many aligned bytes.
fn allocate(bytes: usize) -> Box<[u8]> {
    vec![0; bytes + ALIGNMENT - 1].into_boxed_slice()
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(held) = &self.held else {
            return;
        };
        held.fetch_sub(1, Ordering::Relaxed);
        let memory = std::mem::take(&mut self.memory);
        // A thread that ends keeps no buffers; this one is then freed.
        let _ = FREE.try_with(|buffers| {
            let free = &mut buffers.borrow_mut().free;
            if free.len() < MAX_LARGE_FREE {
                free.push(memory);
            }
        });
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.range.clone()]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.range.clone()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_at_a_cache_line() {
        let buffers: Vec<Buffer> = (0..MAX_LARGE_HELD + 8).map(|_| Buffer::take()).collect();
        for buffer in &buffers {
            assert_eq!(buffer.as_ptr().align_offset(ALIGNMENT), 0);
        }
    }

    #[test]
    fn buffers_shrink_once_many_are_held_and_come_back_large() {
        let held: Vec<Buffer> = (0..=MAX_LARGE_HELD).map(|_| Buffer::take()).collect();
        assert_eq!(
            held.iter()
                .filter(|buffer| buffer.len() == LARGE_BYTES)
                .count(),
            256
        );
        assert_eq!(held.last().map(|buffer| buffer.len()), Some(SMALL_BYTES));
        drop(held);
        assert_eq!(Buffer::take().len(), LARGE_BYTES);
        FREE.with_borrow(|buffers| assert_eq!(buffers.free.len(), MAX_LARGE_FREE));
    }
}
