//! The backend's ports: what its workers forward between.
pub mod vhost_user;
