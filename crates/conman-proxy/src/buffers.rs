use std::cell::RefCell;
use std::ops::{Deref, DerefMut, Range};

/// Read size of a tunnel: a WebSocket message of 64 KiB with its header in one call.
const LARGE_BYTES: usize = 128 * 1024;

/// Read size once too many large buffers are held by peers that read slowly.
const SMALL_BYTES: usize = 8 * 1024;

/// Alignment of a buffer: a cache line. `recv` of 64 KiB into memory with the allocator's
/// alignment of 16 bytes took four times as long on the tested machines.
const ALIGNMENT: usize = 64;

/// Most large buffers that the tunnels of one worker hold at a time: 32 MiB.
const MAX_LARGE_HELD: usize = 256;

/// Most free large buffers that a worker keeps. Tunnels that drain at once need one or two.
const MAX_LARGE_FREE: usize = 16;

thread_local! {
    static SHELF: RefCell<Shelf> = const { RefCell::new(Shelf { free: Vec::new(), held: 0 }) };
}

/// The buffers of one worker thread.
struct Shelf {
    free: Vec<Box<[u8]>>,
    held: usize,
}

/// A buffer of the worker's shelf; dropping it puts it back.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Box<[u8]>,
    /// The aligned part of the memory.
    range: Range<usize>,
}

impl Buffer {
    /// A buffer with the content of an earlier user.
    pub(crate) fn take() -> Self {
        let large = SHELF.with_borrow_mut(|shelf| {
            if shelf.held >= MAX_LARGE_HELD {
                return None;
            }
            shelf.held += 1;
            Some(shelf.free.pop().unwrap_or_else(|| allocate(LARGE_BYTES)))
        });
        let memory = large.unwrap_or_else(|| allocate(SMALL_BYTES));
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT - 1);
        let range = start..start + memory.len() - (ALIGNMENT - 1);
        Self { memory, range }
    }
}

/// Memory with room for this many aligned bytes.
fn allocate(bytes: usize) -> Box<[u8]> {
    vec![0; bytes + ALIGNMENT - 1].into_boxed_slice()
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.len() != LARGE_BYTES {
            return;
        }
        let memory = std::mem::take(&mut self.memory);
        // A thread that ends has no shelf any more; the buffer is then freed.
        let _ = SHELF.try_with(|shelf| {
            let mut shelf = shelf.borrow_mut();
            shelf.held = shelf.held.saturating_sub(1);
            if shelf.free.len() < MAX_LARGE_FREE {
                shelf.free.push(memory);
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
        SHELF.with_borrow(|shelf| assert_eq!(shelf.free.len(), MAX_LARGE_FREE));
    }
}
