//! Sessions that `crun` runs do what every runtime must.

use conman_testkit::runtime_conformance;

use crate::oci_host::WithRuntime;

runtime_conformance!(WithRuntime::crun());
