//! TLS to another machine, by certificates that are named.

use std::fmt;
use std::sync::Arc;

use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, OtherError, RootCertStore, SignatureScheme,
};

use crate::errors::{Error, Result};

/// Whom to trust on the other machine. Certificates of the system are not looked at.
#[derive(Clone)]
pub struct Tls {
    trusted_pem: Vec<u8>,
    server_name: Option<String>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
}

/// Without the identity's key, which is a secret.
impl fmt::Debug for Tls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Tls").field("server_name", &self.server_name).finish_non_exhaustive()
    }
}

impl Tls {
    /// Trusts these certificates (PEM): authorities, or the server's own, which pins it.
    pub fn trusting(pem: impl Into<Vec<u8>>) -> Self {
        Self { trusted_pem: pem.into(), server_name: None, identity: None }
    }

    /// The name in the server's certificate, where it is not the address's host.
    #[must_use]
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }

    /// The client's own certificate and private key (PEM), for a server that asks.
    #[must_use]
    pub fn identity(mut self, certificate_pem: impl Into<Vec<u8>>, key_pem: impl Into<Vec<u8>>) -> Self {
        self.identity = Some((certificate_pem.into(), key_pem.into()));
        self
    }

    pub(crate) fn dialer(&self, host: &str) -> Result<TlsDialer> {
        let refusal = |error: &dyn std::fmt::Display| Error::invalid("tls", error);
        let name = self.server_name.as_deref().unwrap_or(host).to_owned();
        let provider = Arc::new(ring::default_provider());
        let verifier = Pinned::new(certificates(&self.trusted_pem)?)?;
        let building = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| refusal(&error))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match &self.identity {
            None => building.with_no_client_auth(),
            Some((certificate, key)) => {
                let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| refusal(&error))?;
                building.with_client_auth_cert(certificates(certificate)?, key).map_err(|error| refusal(&error))?
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec()];
        let server_name = ServerName::try_from(name).map_err(|error| refusal(&error))?;
        Ok(TlsDialer { connector: TlsConnector::from(Arc::new(config)), server_name })
    }
}

/// What makes a connection an encrypted one.
#[derive(Clone)]
pub(crate) struct TlsDialer {
    pub(crate) connector: TlsConnector,
    pub(crate) server_name: ServerName<'static>,
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(Error::invalid("tls", "expected PEM with a certificate")),
        Err(error) => Err(Error::invalid("tls", error)),
    }
}

/// rustls's usual checks; and what `openssl req -x509` makes (a self-signed certificate that calls itself an authority) passes
/// as the server's own if it is one of those that were given: rustls alone refuses an authority there.
#[derive(Debug)]
struct Pinned {
    trusted: Vec<CertificateDer<'static>>,
    usual: Arc<WebPkiServerVerifier>,
}

impl Pinned {
    fn new(trusted: Vec<CertificateDer<'static>>) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        for each in &trusted {
            roots.add(each.clone()).map_err(|error| Error::invalid("tls", error))?;
        }
        let usual = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::new(ring::default_provider()))
            .build()
            .map_err(|error| Error::invalid("tls", error))?;
        Ok(Self { trusted, usual })
    }
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        match self.usual.verify_server_cert(shown, between, name, ocsp, now) {
            // webpki looks at the times of validity before it comes to this.
            Err(error) if is_authority_in_servers_place(&error) && self.trusted.iter().any(|each| each == shown) => {
                verify_server_name(&ParsedCertificate::try_from(shown)?, name)?;
                Ok(ServerCertVerified::assertion())
            }
            checked => checked,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        self.usual.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        self.usual.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.usual.supported_verify_schemes()
    }
}

fn is_authority_in_servers_place(error: &TlsError) -> bool {
    match error {
        TlsError::InvalidCertificate(CertificateError::Other(OtherError(cause))) => cause.to_string() == "CaUsedAsEndEntity",
        _ => false,
    }
}
