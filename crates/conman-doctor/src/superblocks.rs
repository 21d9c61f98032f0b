//! What each native session pays for all superblocks that the host ever had at once.

use conman_linux::SuperblockArray;
use serde::Serialize;

/// The most superblocks that a host had at once since its boot. Each session pays for all of them, since the kernel
/// never shortens the arrays over them that memory cgroups have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Superblocks {
    pub most_at_once: u64,
    pub session_bytes: u64,
}

impl Superblocks {
    /// Measures it, as root. `None` where the kernel does not show it.
    #[must_use]
    pub fn measure() -> Option<Self> {
        let array = SuperblockArray::measure().ok().flatten()?;
        Some(Self {
            most_at_once: array.superblocks,
            session_bytes: array.bytes,
        })
    }

    /// For people.
    #[must_use]
    pub fn to_text(&self) -> String {
        let Self {
            most_at_once,
            session_bytes,
        } = self;
        format!(
            "About {most_at_once} superblocks (mounted file systems, of all programs) were on this host at once since \
             its boot.\nFor them each session takes {} KiB of kernel memory, also when they are gone; only a boot \
             lowers it.",
            session_bytes / 1024
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_names_the_number_and_the_price() {
        let text = Superblocks {
            most_at_once: 12_224,
            session_bytes: 195_584,
        }
        .to_text();
        assert!(text.contains("12224 superblocks"), "{text}");
        assert!(text.contains("191 KiB"), "{text}");
    }
}
