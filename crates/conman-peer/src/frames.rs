//! The frames of a WebSocket, as far as they matter to what passes them on.

use conman_core::Closing;

/// Longest header of a WebSocket frame: two bytes, an eight-byte length, a mask (RFC 6455,
/// section 5.2).
const MAX_HEADER_BYTES: usize = 14;

/// Opcode of a Close frame.
const OPCODE_CLOSE: u8 = 0x8;

/// Tracks the frames of a WebSocket's server-to-client direction while bytes stream by, so that a
/// frame of the proxy can be inserted between two of the server's.
///
/// Only headers are examined: extensions may change payloads, not lengths.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct FrameTracker {
    position: Position,
    close_seen: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Position {
    /// Within a header, of which `have` bytes have arrived; a boundary if none has.
    Header {
        bytes: [u8; MAX_HEADER_BYTES],
        have: usize,
    },
    /// Within a payload of which this many bytes are still to come.
    Payload(u64),
    /// The bytes are not WebSocket frames; there is no boundary any more.
    Lost,
}

impl Default for Position {
    fn default() -> Self {
        Self::Header {
            bytes: [0; MAX_HEADER_BYTES],
            have: 0,
        }
    }
}

impl FrameTracker {
    /// Whether a frame may begin here.
    pub(crate) fn at_boundary(&self) -> bool {
        matches!(self.position, Position::Header { have: 0, .. })
    }

    /// Whether the server has sent a whole Close frame.
    pub(crate) fn close_seen(&self) -> bool {
        self.close_seen && self.at_boundary()
    }

    /// Processes all `bytes`.
    pub(crate) fn advance(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let used = self.step(bytes);
            bytes = &bytes[used..];
        }
    }

    /// Processes `bytes` up to the first boundary among them, and returns their number.
    pub(crate) fn advance_to_boundary(&mut self, bytes: &[u8]) -> usize {
        let mut used = 0;
        while used < bytes.len() {
            used += self.step(&bytes[used..]);
            if self.at_boundary() {
                break;
            }
        }
        used
    }

    /// Processes at least one byte and at most one header or payload.
    fn step(&mut self, input: &[u8]) -> usize {
        match &mut self.position {
            Position::Lost => input.len(),
            Position::Payload(left) => {
                let used = usize::try_from(*left)
                    .unwrap_or(usize::MAX)
                    .min(input.len());
                *left -= used as u64;
                if *left == 0 {
                    self.position = Position::default();
                }
                used
            }
            Position::Header { bytes, have } => {
                let mut used = 0;
                while used < input.len() {
                    bytes[*have] = input[used];
                    *have += 1;
                    used += 1;
                    if *have >= 2 && *have == header_len(bytes[1]) {
                        self.close_seen |= bytes[0] & 0x0f == OPCODE_CLOSE;
                        self.position = match payload_len(bytes) {
                            None => Position::Lost,
                            Some(0) => Position::default(),
                            Some(length) => Position::Payload(length),
                        };
                        break;
                    }
                }
                used
            }
        }
    }
}

/// Length of a header with this second byte.
fn header_len(second: u8) -> usize {
    let extended = match second & 0x7f {
        126 => 2,
        127 => 8,
        _ => 0,
    };
    let mask = if second & 0x80 == 0 { 0 } else { 4 };
    2 + extended + mask
}

/// Length of the payload after a whole header; `None` for one that RFC 6455 forbids.
fn payload_len(header: &[u8; MAX_HEADER_BYTES]) -> Option<u64> {
    match header[1] & 0x7f {
        126 => Some(u64::from(u16::from_be_bytes([header[2], header[3]]))),
        127 => {
            let mut length = [0; 8];
            length.copy_from_slice(&header[2..10]);
            let length = u64::from_be_bytes(length);
            (length >> 63 == 0).then_some(length)
        }
        length => Some(u64::from(length)),
    }
}

/// An unmasked Close frame with the code and the reason.
pub(crate) fn close_frame(closing: &Closing) -> Vec<u8> {
    let reason = closing.reason().as_bytes();
    let reason = &reason[..reason.len().min(Closing::MAX_REASON_BYTES)];
    // At most 125: a control frame's payload, and what the single length byte can express.
    let length = u8::try_from(2 + reason.len()).unwrap_or(2);
    let mut frame = vec![0x80 | OPCODE_CLOSE, length];
    frame.extend_from_slice(&closing.code.to_be_bytes());
    frame.extend_from_slice(reason);
    frame
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(opcode: u8, length: usize, wide: u8, mask: bool) -> Vec<u8> {
        let mask_bit = if mask { 0x80 } else { 0 };
        let mut bytes = vec![0x80 | opcode];
        if wide == 2 {
            bytes.push(127 | mask_bit);
            bytes.extend_from_slice(&(length as u64).to_be_bytes());
        } else if wide == 1 || length > 125 {
            bytes.push(126 | mask_bit);
            let short = u16::try_from(length).expect("test frames are short");
            bytes.extend_from_slice(&short.to_be_bytes());
        } else {
            bytes.push(u8::try_from(length).expect("short") | mask_bit);
        }
        if mask {
            bytes.extend_from_slice(&[1, 2, 3, 4]);
        }
        // Payload bytes that look like headers.
        bytes.extend(std::iter::repeat_n(0x88, length));
        bytes
    }

    #[test]
    fn a_close_frame_carries_code_and_reason() {
        let frame = close_frame(&Closing::new(1012, "moving"));
        assert_eq!(frame, [&[0x88, 8, 0x03, 0xf4][..], b"moving"].concat());
        let longest = close_frame(&Closing::new(1012, &"é".repeat(100)));
        assert!(longest.len() <= 127 && usize::from(longest[1]) == longest.len() - 2);
    }

    #[test]
    fn a_length_with_its_top_bit_set_leaves_no_boundary() {
        let mut tracker = FrameTracker::default();
        tracker.advance(&[0x82, 127, 0x80, 0, 0, 0, 0, 0, 0, 0]);
        tracker.advance(&[0; 100]);
        assert!(!tracker.at_boundary());
    }

    #[test]
    fn a_close_frame_counts_once_it_is_whole() {
        let mut tracker = FrameTracker::default();
        tracker.advance(&[0x88, 2, 3]);
        assert!(!tracker.close_seen());
        tracker.advance(&[0xe8]);
        assert!(tracker.close_seen());
    }

    proptest! {
        #[test]
        fn boundaries_are_where_frames_end_however_the_bytes_are_cut(
            frames in proptest::collection::vec(
                (0_u8..=2, 0_usize..400, 0_u8..=2, any::<bool>()),
                1..8,
            ),
            cuts in proptest::collection::vec(1_usize..50, 1..100),
        ) {
            let mut stream = Vec::new();
            let mut ends = vec![0];
            for (opcode, length, wide, mask) in frames {
                stream.extend(frame(opcode, length, wide, mask));
                ends.push(stream.len());
            }
            let mut tracker = FrameTracker::default();
            let mut at = 0;
            for cut in cuts.into_iter().cycle() {
                if at == stream.len() {
                    break;
                }
                let to = (at + cut).min(stream.len());
                let before = tracker.clone();
                tracker.advance(&stream[at..to]);
                prop_assert_eq!(tracker.at_boundary(), ends.contains(&to));

                let mut stopping = before;
                let used = stopping.advance_to_boundary(&stream[at..to]);
                let next_end = ends.iter().copied().find(|&end| end > at);
                prop_assert_eq!(at + used, next_end.map_or(to, |end| end.min(to)));
                at = to;
            }
            prop_assert!(tracker.at_boundary());
            prop_assert!(!tracker.close_seen());
        }
    }
}
