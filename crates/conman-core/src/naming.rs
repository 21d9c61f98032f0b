//! The names of all objects that conman creates for a session.
//!
//! Each name depends only on the instance, the session and the generation. So a container whose
//! creation was not answered can still be found, and no two generations ever share a name.

use std::fmt;
use std::str::FromStr;

use conman_proto::{Generation, SessionId};
use serde::{Deserialize, Serialize};

/// Container label with the instance that created it.
pub const LABEL_INSTANCE: &str = "dev.conman.instance";
/// Container label with the session's id.
pub const LABEL_SESSION: &str = "dev.conman.session";
/// Container label with the generation.
pub const LABEL_GENERATION: &str = "dev.conman.generation";

/// Length of an instance id in characters.
const INSTANCE_CHARS: usize = 8;

/// One installation of conman on a host: 8 lower-case hexadecimal digits, random, drawn when its
/// state directory is created.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Instance(Box<str>);

/// Why a text is not an instance id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an instance id is {INSTANCE_CHARS} digits of 0-9 and a-f")]
pub struct InstanceError;

impl Instance {
    /// From random bytes.
    #[must_use]
    pub fn new(random: [u8; 4]) -> Self {
        Self(format!("{:08x}", u32::from_be_bytes(random)).into())
    }

    /// Parses an id made by [`Instance::new`].
    pub fn parse(text: &str) -> Result<Self, InstanceError> {
        let valid = text.len() == INSTANCE_CHARS
            && text
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if valid {
            Ok(Self(text.into()))
        } else {
            Err(InstanceError)
        }
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Instance {
    type Err = InstanceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl TryFrom<String> for Instance {
    type Error = InstanceError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text)
    }
}

impl From<Instance> for String {
    fn from(instance: Instance) -> Self {
        instance.0.into()
    }
}

impl fmt::Display for Instance {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// The program that creates cgroups on this host, in Docker's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CgroupDriver {
    /// Each program creates directories itself.
    Cgroupfs,
    /// systemd creates slices and scopes.
    Systemd,
}

/// Where a generation's container creates its cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupParent {
    /// The name for the runtime: a path with cgroupfs, the name of a slice with systemd.
    pub name: String,
    /// The path in every hierarchy, as `/proc/PID/cgroup` shows it.
    pub path: String,
}

/// `conman-<instance>-<id>-<generation>`.
#[must_use]
pub fn container_name(instance: &Instance, id: &SessionId, generation: Generation) -> String {
    format!("conman-{instance}-{id}-{generation}")
}

/// The parent cgroup of one generation, below that of the instance.
#[must_use]
pub fn cgroup_parent(
    instance: &Instance,
    id: &SessionId,
    generation: Generation,
    driver: CgroupDriver,
) -> CgroupParent {
    let above = instance_cgroup(instance, driver);
    match driver {
        CgroupDriver::Cgroupfs => {
            let path = format!("{above}/{id}.{generation}");
            CgroupParent {
                name: path.clone(),
                path,
            }
        }
        CgroupDriver::Systemd => {
            // systemd nests a slice below another at each '-' (systemd.slice(5)); those of the id
            // become '_', which no id contains.
            let id = id.as_str().replace('-', "_");
            let name = format!("conman_{instance}-{id}_{generation}.slice");
            CgroupParent {
                path: format!("{above}/{name}"),
                name,
            }
        }
    }
}

/// The session and generation of a systemd slice below `above`, the instance's slice: the inverse
/// of [`cgroup_parent`].
#[must_use]
pub fn parse_slice(above: &str, slice: &str) -> Option<(SessionId, Generation)> {
    let above = above.strip_prefix('/')?.strip_suffix(".slice")?;
    let rest = slice.strip_prefix(above)?.strip_prefix('-')?;
    let (id, generation) = rest.strip_suffix(".slice")?.rsplit_once('_')?;
    let id = id.replace('_', "-").parse().ok()?;
    Some((id, Generation::new(generation.parse().ok()?)?))
}

/// The path of the cgroup that holds all sessions of an instance.
#[must_use]
pub fn instance_cgroup(instance: &Instance, driver: CgroupDriver) -> String {
    match driver {
        CgroupDriver::Cgroupfs => format!("/conman-{instance}"),
        CgroupDriver::Systemd => format!("/conman_{instance}.slice"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids() -> impl Strategy<Value = SessionId> {
        // Few different characters, so that near misses come up.
        "[a1]([a1-]{0,4}[a1])?".prop_filter_map("it begins like a port", |text| text.parse().ok())
    }

    fn generations() -> impl Strategy<Value = Generation> {
        prop_oneof![1_u64..30, 1_u64..=u64::MAX]
            .prop_map(|value| Generation::new(value).expect("not zero"))
    }

    const DRIVERS: [CgroupDriver; 2] = [CgroupDriver::Cgroupfs, CgroupDriver::Systemd];

    #[test]
    fn names_have_their_documented_form() {
        let instance = Instance::new([0x1a, 0x2b, 0x3c, 0x4d]);
        let id: SessionId = "alice-b".parse().expect("a session id");
        let generation = Generation::new(7).expect("not zero");
        assert_eq!(
            container_name(&instance, &id, generation),
            "conman-1a2b3c4d-alice-b-7"
        );
        assert_eq!(
            cgroup_parent(&instance, &id, generation, CgroupDriver::Cgroupfs).path,
            "/conman-1a2b3c4d/alice-b.7"
        );
        assert_eq!(
            cgroup_parent(&instance, &id, generation, CgroupDriver::Systemd),
            CgroupParent {
                name: "conman_1a2b3c4d-alice_b_7.slice".to_owned(),
                path: "/conman_1a2b3c4d.slice/conman_1a2b3c4d-alice_b_7.slice".to_owned(),
            }
        );
    }

    #[test]
    fn what_only_looks_like_an_instance_id_is_refused() {
        for text in [
            "",
            "1a2b3c4",
            "1a2b3c4d5",
            "1A2B3C4D",
            "1a2b3c4g",
            "ääää",
            "1a2b 34d",
        ] {
            assert_eq!(Instance::parse(text), Err(InstanceError), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsing_an_instance_id_gives_back_what_it_was_made_of(random: [u8; 4]) {
            let instance = Instance::new(random);
            prop_assert_eq!(Instance::parse(instance.as_str()), Ok(instance.clone()));
        }

        #[test]
        fn a_slice_tells_whose_it_is(id in ids(), generation in generations()) {
            let instance = Instance::new([1; 4]);
            let above = instance_cgroup(&instance, CgroupDriver::Systemd);
            let slice = cgroup_parent(&instance, &id, generation, CgroupDriver::Systemd).name;
            prop_assert_eq!(parse_slice(&above, &slice), Some((id, generation)));
            let other = instance_cgroup(&Instance::new([2; 4]), CgroupDriver::Systemd);
            prop_assert_eq!(parse_slice(&other, &slice), None);
        }

        #[test]
        fn two_generations_never_share_a_name_a_cgroup_or_a_slice(
            one in (ids(), generations()), other in (ids(), generations()),
        ) {
            prop_assume!(one != other);
            let instance = Instance::new([1; 4]);
            prop_assert_ne!(
                container_name(&instance, &one.0, one.1),
                container_name(&instance, &other.0, other.1)
            );
            for driver in DRIVERS {
                let one = cgroup_parent(&instance, &one.0, one.1, driver);
                let other = cgroup_parent(&instance, &other.0, other.1, driver);
                prop_assert_ne!(&one.name, &other.name);
                prop_assert_ne!(one.path, other.path);
            }
        }

        #[test]
        fn a_generation_lies_below_its_instance_and_no_other(
            random: [u8; 4], other: [u8; 4], id in ids(), generation in generations(),
        ) {
            prop_assume!(random != other);
            for driver in DRIVERS {
                let path = cgroup_parent(&Instance::new(random), &id, generation, driver).path;
                let own = format!("{}/", instance_cgroup(&Instance::new(random), driver));
                let foreign = format!("{}/", instance_cgroup(&Instance::new(other), driver));
                prop_assert!(path.starts_with(&own));
                prop_assert!(!path.starts_with(&foreign));
            }
        }
    }
}
