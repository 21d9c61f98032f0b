//! PAX records of an archive's entries.

use std::io::Read;

use rustix::fs::Timespec;
use tar::{Entry, Header};

use crate::unpack::error::Refusal;

const BLOCK_BYTES: usize = 512;

const CAPABILITY: &[u8] = b"SCHILY.xattr.security.capability";

/// Sizes of the two forms of `security.capability` (vfs_cap_data, vfs_ns_cap_data).
const CAPABILITY_BYTES: [usize; 2] = [20, 24];

/// Records that the tar crate uses to find an entry and its data.
const STRUCTURAL: [&[u8]; 5] = [b"path", b"linkpath", b"size", b"uid", b"gid"];

/// A key and its value.
type Record<'a> = (&'a [u8], &'a [u8]);

/// The PAX records of an entry that the header cannot express.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PaxRecords {
    pub(super) capability: Option<Vec<u8>>,
    pub(super) modified: Option<Timespec>,
}

impl PaxRecords {
    /// Reads the records from the `headers` before an entry, because the tar crate splits them at
    /// newlines, which values may contain: those of extended attributes are binary.
    pub(super) fn read<R: Read>(headers: &[u8], entry: &mut Entry<'_, R>) -> Result<Self, Refusal> {
        let Some(data) = extended_header(headers)? else {
            return Ok(Self::default());
        };
        let records = split(data)?;
        if records.iter().any(|(_, value)| value.contains(&b'\n')) {
            // If the crate may have read something else than what is written, the result must not
            // depend on it.
            let by_line = entry.pax_extensions().map_err(|_| Refusal::PaxRecord)?;
            let by_line = by_line.into_iter().flatten().flatten();
            let mut keys = by_line
                .map(|record| record.key_bytes())
                .chain(records.iter().map(|(key, _)| *key));
            if keys.any(|key| STRUCTURAL.contains(&key)) {
                return Err(Refusal::PaxRecord);
            }
        }
        let mut this = Self::default();
        for (key, value) in records {
            match key {
                key if key.starts_with(b"GNU.sparse.") => return Err(Refusal::PaxSparse),
                CAPABILITY if CAPABILITY_BYTES.contains(&value.len()) => {
                    this.capability = Some(value.to_vec());
                }
                CAPABILITY => return Err(Refusal::BadCapability),
                b"mtime" => {
                    this.modified = Some(time(value).ok_or(Refusal::BadHeader("time"))?);
                }
                _ => {}
            }
        }
        Ok(this)
    }
}

/// The data of the extended header among the headers of one entry.
fn extended_header(headers: &[u8]) -> Result<Option<&[u8]>, Refusal> {
    let mut at = 0;
    let mut found = None;
    while let Some(block) = headers.get(at..at + BLOCK_BYTES) {
        let mut header = Header::new_old();
        header.as_mut_bytes().copy_from_slice(block);
        let kind = header.entry_type();
        let extends =
            kind.is_pax_local_extensions() || kind.is_gnu_longname() || kind.is_gnu_longlink();
        if !extends || (header.as_ustar().is_none() && header.as_gnu().is_none()) {
            break;
        }
        let size = header
            .entry_size()
            .ok()
            .and_then(|size| usize::try_from(size).ok());
        let start = at + BLOCK_BYTES;
        let end = size.and_then(|size| start.checked_add(size));
        let data = end.and_then(|end| headers.get(start..end));
        let data = data.ok_or(Refusal::PaxRecord)?;
        if kind.is_pax_local_extensions() {
            found = Some(data);
        }
        at = start + data.len().next_multiple_of(BLOCK_BYTES);
    }
    Ok(found)
}

/// `LENGTH KEY=VALUE\n`, where the length counts all of it (POSIX, pax Extended Header).
fn split(mut data: &[u8]) -> Result<Vec<Record<'_>>, Refusal> {
    let mut records = Vec::new();
    while !data.is_empty() && data[0] != 0 {
        let record = (|| {
            let space = data.iter().position(|byte| *byte == b' ')?;
            let length: usize = std::str::from_utf8(&data[..space]).ok()?.parse().ok()?;
            let body = data.get(space + 1..length)?.strip_suffix(b"\n")?;
            let equals = body.iter().position(|byte| *byte == b'=')?;
            Some((&body[..equals], &body[equals + 1..], length))
        })();
        let (key, value, length) = record.ok_or(Refusal::PaxRecord)?;
        records.push((key, value));
        data = &data[length..];
    }
    Ok(records)
}

/// Seconds with a decimal fraction, as PAX writes times.
fn time(value: &[u8]) -> Option<Timespec> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().ok()?;
    if !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let nanos: String = fraction
        .chars()
        .chain("000000000".chars())
        .take(9)
        .collect();
    let nanos: i64 = nanos.parse().ok()?;
    Some(match (whole.starts_with('-'), nanos) {
        (true, 1..) => Timespec {
            tv_sec: seconds.checked_sub(1)?,
            tv_nsec: 1_000_000_000 - nanos,
        },
        _ => Timespec {
            tv_sec: seconds,
            tv_nsec: nanos,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_split_by_their_length_and_not_by_lines() {
        let data = b"9 a=b\nc=\n6 x=y\n";
        assert_eq!(
            split(data).expect("well formed"),
            [(&b"a"[..], &b"b\nc="[..]), (b"x", b"y")]
        );
        for bad in [
            "6 x=y",
            "7 x=y\n",
            "5 x=y\n",
            "x=y\n",
            "6 xxy\n",
            "0 x=y\n",
            "99999999999999999999 x=y\n",
        ] {
            assert_eq!(split(bad.as_bytes()), Err(Refusal::PaxRecord), "{bad:?}");
        }
    }

    #[test]
    fn times_before_1970_and_fractions_are_exact() {
        let at = |text: &str| time(text.as_bytes()).map(|time| (time.tv_sec, time.tv_nsec));
        assert_eq!(at("1.5"), Some((1, 500_000_000)));
        assert_eq!(at("1.1234567891"), Some((1, 123_456_789)));
        assert_eq!(at("-1.25"), Some((-2, 750_000_000)));
        assert_eq!(at("-0.5"), Some((-1, 500_000_000)));
        assert_eq!(at("7"), Some((7, 0)));
        for bad in ["", "x", "1.x", "1.-5", "9223372036854775808"] {
            assert_eq!(at(bad), None, "{bad:?}");
        }
    }
}
