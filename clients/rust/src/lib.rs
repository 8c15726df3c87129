//! The Rust client of Kvasir: agents' conversations with an engine, and their memories by name.
//!
//! One [`Client`] speaks to one engine (`unix:/path` or `host:port`), which also answers for the agents of its store; a store's
//! own address answers for agents too. It is cheap to clone, and clones share the connection. Every error is an [`Error`].
//!
//! Requests that only read are asked again when the service is UNAVAILABLE, four times in all, because repeating them changes
//! nothing. A turn is not asked again by itself: give it a [`Turn::request_id`], and asking again with it and the same input does
//! nothing twice.

mod address;
mod agents;
mod calls;
mod client;
mod errors;
mod hashes;
mod tls;
mod turns;

pub use agents::{AgentFilter, At, Pull};
pub use client::{AgentStub, Builder, Client, InferenceStub, Transport};
pub use errors::{Error, Result};
pub use hashes::{BLOCK_TOKENS, block_hash, block_hashes, digest_of, is_hash, kv_identity_hash, window_block_hash};
pub use tls::Tls;
pub use tonic::Code;
pub use turns::{Choice, Events, Reply, Turn, assistant, system, tool_result, user};

/// The generated messages and stubs of the contract, in its packages.
#[allow(clippy::all, clippy::pedantic, missing_docs, rustdoc::all)]
pub mod proto {
    pub mod common {
        pub mod v1 {
            tonic::include_proto!("kvasir.common.v1");
        }
    }
    pub mod cachestore {
        pub mod v1 {
            tonic::include_proto!("kvasir.cachestore.v1");
        }
    }
    pub mod inference {
        pub mod v1 {
            tonic::include_proto!("kvasir.inference.v1");
        }
    }
}
