//! Tests of what documents state about the shim.

mod security_page;
