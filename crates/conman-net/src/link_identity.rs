//! How an instance's links are told from all others: by name and by interface group.
//!
//! Bits of a group: `0x4` in the highest four, 12 bits of the instance, 16 bits of the *class*, which is
//! the egress list that the rules apply to the link. Class 0 is that of links to be swept. Several
//! instances may share a group's bits; their names always differ.

use std::net::Ipv4Addr;

/// Bits of a group that an instance's links have in common.
pub const GROUP_MASK: u32 = 0xffff_0000;

/// Digits of the base that names use for addresses.
const DIGITS: &[u8; 32] = b"0123456789abcdefghijklmnopqrstuv";

/// Number of digits for the lower 30 bits of an address.
const ADDRESS_DIGITS: u32 = 6;

/// The names and groups of one instance's links.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkIdentity {
    prefix: String,
    group: u32,
}

impl LinkIdentity {
    /// Of the instance with this id: eight hexadecimal digits.
    pub fn new(instance: &str) -> Self {
        let bits = u32::from_str_radix(instance, 16).unwrap_or_default();
        Self {
            prefix: format!("c{instance}"),
            group: 0x4000_0000 | (bits & 0x0fff) << 16,
        }
    }

    /// Beginning of the names of all links.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Whether a link of this name belongs to the instance.
    pub fn owns(&self, name: &str) -> bool {
        name.strip_prefix(&self.prefix)
            .is_some_and(|rest| rest.len() == ADDRESS_DIGITS as usize)
    }

    /// Name of the host's end of the link with this address. Addresses of a pool differ in the lower 30
    /// bits, so their names do.
    pub fn name(&self, address: Ipv4Addr) -> String {
        let digits = (0..ADDRESS_DIGITS).rev().map(|digit| {
            let value = (address.to_bits() >> (5 * digit)) & 31;
            char::from(DIGITS[value as usize])
        });
        self.prefix.chars().chain(digits).collect()
    }

    /// Name of the device of a VXLAN fabric.
    pub(crate) fn fabric_device(&self) -> String {
        format!("{}f", self.prefix)
    }

    /// Group of the links of a class.
    pub fn group(&self, class: u16) -> u32 {
        self.group | u32::from(class)
    }

    /// Group of links that are about to be deleted.
    pub fn sweep_group(&self) -> u32 {
        self.group
    }
}

/// Class of the links of a template, by its name: a hash (FNV-1a), so that it never depends on which other
/// templates there are. Never 0.
pub fn class_of(name: &str) -> u16 {
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    });
    let [a, b, c, d] = hash.to_be_bytes();
    u16::from_be_bytes([a ^ c, b ^ d]).max(1)
}

/// Interface index of both ends of the link with this address. It is chosen here so that messages about a
/// link can be sent before the kernel has answered its creation.
pub(crate) fn link_index(address: Ipv4Addr) -> u32 {
    0x4000_0000 | (address.to_bits() & 0x3fff_ffff)
}

/// Hardware address of both ends: with the same one, and without ARP, neither has to look for the other.
pub(crate) fn link_mac(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x02, 0x63, a, b, c, d]
}

/// A hardware address as people and `nft` write it.
pub(crate) fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_fits_the_kernel_and_belongs_to_its_instance_only() {
        let ours = LinkIdentity::new("0a1b2c3d");
        let name = ours.name(Ipv4Addr::new(10, 88, 3, 7));
        assert_eq!(name, "c0a1b2c3d55g0o7");
        assert!(name.len() <= 15 && ours.owns(&name));
        assert!(!LinkIdentity::new("0a1b2c3e").owns(&name));
        assert!(!ours.owns("c0a1b2c3d") && !ours.owns("eth0") && !ours.owns("c0a1b2c3d55g0o78"));
    }

    #[test]
    fn classes_have_groups_of_the_instance() {
        let ours = LinkIdentity::new("0a1b2c3d");
        assert_eq!(ours.group(0x1234), 0x4c3d_1234);
        assert_eq!(ours.sweep_group() & GROUP_MASK, ours.group(7) & GROUP_MASK);
    }
}
