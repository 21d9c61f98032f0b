//! Going on as the program that was put in place while this one stood by.

use super::Control;
use super::replacing::GOES_ON;

impl Control {
    /// After another shim was waited for: has this one go on as what is at its path, where that is
    /// another program since, as after an upgrade. Otherwise an older one would succeed a newer one
    /// for good. What runs is watched over first: the other program's file may be on a disk that
    /// hangs.
    pub(super) fn begin_renewing(&mut self) {
        // Of a file that was removed, or has another name now, the kernel says so, and asks no disk.
        if std::env::current_exe().is_ok_and(|own| own == self.program) {
            return;
        }
        tracing::info!(
            program = %self.program.display(),
            "the shim's program was replaced while it stood by; asking the new one to go on"
        );
        if let Err(error) = self.begin_replacing(None, None) {
            tracing::error!(%error, "{}", GOES_ON);
        }
    }
}
