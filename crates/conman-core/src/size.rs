//! Sizes in words.

/// `1.5 GiB`, `64 MiB`, `256 KiB`, `100 bytes`.
#[must_use]
pub fn size(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..0x400 => return format!("{bytes} bytes"),
        0x400..0x10_0000 => (1_u64 << 10, "KiB"),
        0x10_0000..0x4000_0000 => (1 << 20, "MiB"),
        _ => (1 << 30, "GiB"),
    };
    let tenths = u128::from(bytes) * 10 / u128::from(unit);
    match tenths % 10 {
        0 => format!("{} {name}", tenths / 10),
        rest => format!("{}.{rest} {name}", tenths / 10),
    }
}

/// The number for programs and the size for people: `6291456 (6 MiB)`.
pub(crate) fn bytes_and_size(bytes: u64) -> String {
    format!("{bytes} ({})", size(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_shown_in_the_greatest_unit_that_fits() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1_023, "1023 bytes"),
            (256 << 10, "256 KiB"),
            (64 << 20, "64 MiB"),
            (3 << 29, "1.5 GiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }
}
