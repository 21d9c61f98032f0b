//! Input in frames, so that an input that ends early differs from a complete one.

use std::io::{self, Read};

/// Input in frames, so that an input that ends early differs from a complete one.
#[derive(Debug)]
pub(super) struct Frames<R> {
    from: R,
    /// Unread bytes of the present frame.
    left: u32,
    complete: bool,
}

impl<R: Read> Frames<R> {
    pub(super) fn new(from: R) -> Self {
        Self {
            from,
            left: 0,
            complete: false,
        }
    }
}

impl<R: Read> Read for Frames<R> {
    /// `UnexpectedEof` if the input ends early.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && !self.complete {
            let mut length = [0; 4];
            self.from.read_exact(&mut length)?;
            self.left = u32::from_be_bytes(length);
            self.complete = self.left == 0;
        }
        if self.complete || buffer.is_empty() {
            return Ok(0);
        }
        let most = buffer.len().min(self.left as usize);
        match self.from.read(&mut buffer[..most])? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                self.left -= u32::try_from(read).unwrap_or(self.left);
                Ok(read)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        Frames::new(bytes).read_to_end(&mut all).map(|_| all)
    }

    #[test]
    fn only_an_input_with_its_last_frame_is_complete() {
        let whole = b"\0\0\0\x03abc\0\0\0\x01d\0\0\0\0";
        assert_eq!(read(whole).expect("complete"), b"abcd");
        for cut in 0..whole.len() {
            let error = read(&whole[..cut]).expect_err("cut");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{cut}");
        }
    }
}
