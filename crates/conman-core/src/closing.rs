//! How the tunnels of an ending session are closed.

/// How the tunnels of an ending session are closed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Closing {
    /// WebSocket close code (RFC 6455, section 7.4), for example 1012, "service restart".
    pub code: u16,
    reason: String,
}

impl Closing {
    /// Maximum length of a reason in bytes: a Close frame's payload is at most 125 bytes, two of
    /// them the code.
    pub const MAX_REASON_BYTES: usize = 123;

    /// The session's node gives it up; another node will serve it.
    #[must_use]
    pub fn service_restart(reason: &str) -> Self {
        Self::new(1012, reason)
    }

    /// `reason` is truncated at a character boundary if it is too long for a Close frame.
    #[must_use]
    pub fn new(code: u16, reason: &str) -> Self {
        let mut end = reason.len().min(Self::MAX_REASON_BYTES);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        Self {
            code,
            reason: reason[..end].to_owned(),
        }
    }

    /// The reason in words.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }
}
