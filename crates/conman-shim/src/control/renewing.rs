//! Replacing the shim's program by the one that was installed while this one stood by.

use super::Control;
use super::replacing::GOES_ON;

impl Control {
    /// After waiting for another shim: replaces this program by the file at its path if that has changed, as
    /// after an upgrade. Otherwise an older shim would succeed a newer one permanently. Containers are
    /// adopted first: the other program's file may be on a disk that hangs.
    pub(super) fn begin_renewing(&mut self) {
        // The kernel reports a removed or renamed file without reading the disk.
        if std::env::current_exe().is_ok_and(|own| own == self.program) {
            return;
        }
        tracing::info!(
            program = %self.program.display(),
            "the shim's program was replaced while it stood by; switching to the new one"
        );
        if let Err(error) = self.begin_replacing(None, None) {
            tracing::error!(%error, "{}", GOES_ON);
        }
    }
}
