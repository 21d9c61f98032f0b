//! Separates the two outputs that dockerd sends through one connection: a header of eight bytes
//! (the stream's number, three zeros, the length as a big-endian number), then that many bytes.
//!
//! Parts of a frame are passed on as they arrive, so no frame is buffered whole.

use bytes::{Buf, Bytes, BytesMut};

use crate::OutputStream;

const HEADER_BYTES: usize = 8;

/// dockerd's number of the standard output; 2 is the error output and 3 are dockerd's messages.
const STDOUT: u8 = 1;
/// Some daemons number the standard output 0.
const STDIN: u8 = 0;

#[derive(Debug)]
pub(super) struct Frames {
    stream: OutputStream,
    /// Bytes of the current frame that have not arrived yet.
    remaining: usize,
}

impl Frames {
    pub(super) fn new() -> Self {
        Self {
            stream: OutputStream::Stdout,
            remaining: 0,
        }
    }

    /// Takes the next piece from the received bytes; `None` when more must arrive first.
    pub(super) fn next(&mut self, received: &mut BytesMut) -> Option<(OutputStream, Bytes)> {
        while self.remaining == 0 {
            let header = received.first_chunk::<HEADER_BYTES>()?;
            let [number, _, _, _, length @ ..] = *header;
            self.stream = match number {
                STDIN | STDOUT => OutputStream::Stdout,
                _ => OutputStream::Stderr,
            };
            self.remaining = u32::from_be_bytes(length) as usize;
            received.advance(HEADER_BYTES);
        }
        if received.is_empty() {
            return None;
        }
        let piece = received
            .split_to(received.len().min(self.remaining))
            .freeze();
        self.remaining -= piece.len();
        Some((self.stream, piece))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(number: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
        [&[number, 0, 0, 0], &length[..], payload].concat()
    }

    /// Both outputs, however the bytes are split on the way.
    fn take_apart(pieces: &[&[u8]]) -> (Vec<u8>, Vec<u8>) {
        let (mut frames, mut received) = (Frames::new(), BytesMut::new());
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        for piece in pieces {
            received.extend_from_slice(piece);
            while let Some((stream, bytes)) = frames.next(&mut received) {
                match stream {
                    OutputStream::Stdout => stdout.extend_from_slice(&bytes),
                    OutputStream::Stderr => stderr.extend_from_slice(&bytes),
                }
            }
        }
        (stdout, stderr)
    }

    #[test]
    fn a_huge_frame_is_passed_on_as_it_comes() {
        let (mut frames, mut received) = (Frames::new(), BytesMut::new());
        received.extend_from_slice(&[1, 0, 0, 0, 255, 255, 255, 255]);
        assert_eq!(frames.next(&mut received), None);
        for _ in 0..3 {
            received.extend_from_slice(b"piece");
            let piece = (OutputStream::Stdout, Bytes::from_static(b"piece"));
            assert_eq!(frames.next(&mut received), Some(piece));
            assert!(received.is_empty());
        }
    }

    proptest! {
        #[test]
        fn both_outputs_come_whole_wherever_the_bytes_are_cut(
            frames in proptest::collection::vec((1_u8..=2, proptest::collection::vec(any::<u8>(), 0..20)), 0..8),
            cut in 1_usize..20,
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(|(number, payload)| frame(*number, payload)).collect();
            let of = |wanted| frames.iter().filter(move |(n, _)| *n == wanted).flat_map(|(_, p)| p.clone()).collect::<Vec<_>>();
            let pieces: Vec<&[u8]> = bytes.chunks(cut).collect();
            prop_assert_eq!(take_apart(&pieces), (of(1), of(2)));
        }

        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            take_apart(&[&bytes]);
        }
    }
}
