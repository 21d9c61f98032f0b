//! Returns free heap memory to the kernel.

/// Returns free memory of the heap to the kernel, in every arena of the C library's allocator. The
/// allocator itself returns only the end of an arena, so memory that many connections needed once would
/// stay. Walks the free memory; takes milliseconds for hundreds of megabytes.
///
/// Does nothing with C libraries other than glibc.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    trim();
}

#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "malloc_trim(3) has no safe wrapper")]
fn trim() {
    // SAFETY: it takes the allocator's own locks and touches free memory only.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;
    use conman_observer::resident_bytes;

    #[test]
    fn free_memory_between_blocks_in_use_goes_back_to_the_kernel() {
        const BLOCK: usize = 32 * 1024;
        let mut blocks: Vec<Vec<u8>> = (0..2_000).map(|_| vec![1; BLOCK]).collect();
        let mut number = 0;
        blocks.retain(|_| {
            number += 1;
            number % 20 == 0
        });
        let pid = i32::try_from(std::process::id()).expect("a pid");
        let resident = || resident_bytes(pid).expect("own memory");
        let before = resident();
        trim_heap();
        let freed = before.saturating_sub(resident());
        assert!(freed > 1_500 * BLOCK as u64, "{freed} of {before} bytes");
        assert_eq!(blocks.len(), 100);
    }
}
