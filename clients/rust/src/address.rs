//! What an address may be, and whether another machine can be behind it.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::errors::{Error, Result};

// sockaddr_un holds 104 bytes on macOS and 108 on Linux, with the NUL; one limit for both.
const MAX_SOCKET_PATH_BYTES: usize = 100;

/// Where a service listens.
#[derive(Clone, Debug)]
pub(crate) enum Address {
    Socket(PathBuf),
    Tcp { host: String, port: u16 },
}

impl Address {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        if let Some(path) = text.strip_prefix("unix:") {
            return socket(path);
        }
        let refusal = || Error::invalid("address", format!("{text:?}: expected unix:/path, host:port or [v6 address]:port"));
        let (host, port) = text.rsplit_once(':').ok_or_else(refusal)?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(refusal)?;
        let host = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').filter(|ip| ip.parse::<IpAddr>().is_ok()),
            None => Some(host).filter(|name| !name.is_empty() && !name.contains([':', '/', ']', ' '])),
        };
        Ok(Self::Tcp { host: host.ok_or_else(refusal)?.to_owned(), port })
    }

    /// False if another machine may be behind it.
    pub(crate) fn is_loopback(&self) -> bool {
        match self {
            Self::Socket(_) => true,
            Self::Tcp { host, .. } => host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback()),
        }
    }
}

fn socket(path: &str) -> Result<Address> {
    let refusal = |why: String| Err(Error::invalid("address", format!("unix:{path}: {why}")));
    if !path.starts_with('/') || path.contains('\0') {
        return refusal("expected an absolute path".to_owned());
    }
    if path.contains('%') {
        return refusal("a socket's path may have no %".to_owned());
    }
    if path.len() > MAX_SOCKET_PATH_BYTES {
        return refusal(format!("{} bytes; a socket may have {MAX_SOCKET_PATH_BYTES}", path.len()));
    }
    Ok(Address::Socket(path.into()))
}
