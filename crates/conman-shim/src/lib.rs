//! The parent of all native containers.
