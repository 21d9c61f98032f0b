//! What a host's kernel offers for native sessions.

use conman_linux::{Features, Interface};
use serde::Serialize;

/// What a host's kernel offers for native sessions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Kernel {
    /// `uname -r`.
    pub release: String,
    /// Why no session can start; empty when sessions can start.
    pub missing: Vec<String>,
    /// Optional interfaces.
    pub optional: Vec<KernelInterface>,
}

/// An interface that not every kernel has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KernelInterface {
    pub name: &'static str,
    /// The first kernel that has it.
    pub since: &'static str,
    pub present: bool,
    /// What happens without it.
    pub without: &'static str,
}

impl From<&Features> for Kernel {
    fn from(features: &Features) -> Self {
        let (major, minor) = Features::FLOOR;
        let missing = [
            (
                !features.reaches_floor(),
                format!("Linux {major}.{minor} or later is needed"),
            ),
            (
                !features.user_namespaces,
                "user namespaces are switched off: raise user.max_user_namespaces".to_owned(),
            ),
        ];
        let missing = missing.into_iter().filter(|(missing, _)| *missing);
        Self {
            release: features.release.clone(),
            missing: missing.map(|(_, what)| what).collect(),
            optional: Interface::ALL
                .into_iter()
                .map(|one| KernelInterface {
                    name: one.name(),
                    since: one.since(),
                    present: features.has(one),
                    without: one.without(),
                })
                .collect(),
        }
    }
}

impl Kernel {
    /// For people: what is missing, and the consequences.
    pub fn to_text(&self) -> String {
        let Self { release, .. } = self;
        let absent = self.optional.iter().filter(|one| !one.present);
        let absent = absent.map(|one| {
            let KernelInterface {
                name,
                since,
                without,
                ..
            } = one;
            format!("  {name} (Linux {since}): {without}")
        });
        let missing = self.missing.iter().map(|what| format!("  {what}"));
        let lines: Vec<String> = missing.chain(absent).collect();
        match (self.missing.is_empty(), lines.is_empty()) {
            (_, true) => format!("Linux {release} has everything that sessions use."),
            (true, false) => format!(
                "Linux {release} can run sessions; what it lacks, and the consequences:\n{}",
                lines.join("\n")
            ),
            (false, _) => format!(
                "Linux {release} cannot hold native sessions:\n{}",
                lines.join("\n")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn everything() -> Features {
        Features {
            release: "6.15.0".to_owned(),
            present: Interface::ALL.into(),
            unified_cgroups: true,
            user_namespaces: true,
        }
    }

    #[test]
    fn what_a_kernel_lacks_is_told_with_what_follows() {
        let whole = Kernel::from(&everything());
        assert!(whole.to_text().contains("has everything"));
        for interface in Interface::ALL {
            let kernel = Kernel::from(&everything().without(&[interface]));
            assert!(kernel.missing.is_empty());
            let text = kernel.to_text();
            assert!(text.contains(interface.name()), "{text}");
            assert!(text.contains(interface.without()), "{text}");
        }
    }

    #[test]
    fn a_kernel_below_the_floor_or_without_user_namespaces_holds_no_session() {
        let old = Features {
            release: "5.9.16-amd64".to_owned(),
            ..everything()
        };
        let closed = Features {
            user_namespaces: false,
            ..everything()
        };
        for (features, reason) in [(old, "Linux 5.10"), (closed, "max_user_namespaces")] {
            let text = Kernel::from(&features).to_text();
            assert!(text.contains("cannot hold"), "{text}");
            assert!(text.contains(reason), "{text}");
        }
    }
}
