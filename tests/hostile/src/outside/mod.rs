//! Probes with sessions of their own, judged from outside.

pub(crate) mod accounts;
pub(crate) mod binds;
pub(crate) mod burdens;
pub(crate) mod deaths;
pub(crate) mod entering;
pub(crate) mod host;
pub(crate) mod http_backends;
pub(crate) mod images;
pub(crate) mod limits;
pub(crate) mod logs;
pub(crate) mod starvation;
pub(crate) mod terminals;
