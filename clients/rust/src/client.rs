//! The connection to a service, and what every call over it has.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tonic::codegen::http::Uri;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::address::Address;
use crate::calls::Deadline;
use crate::errors::{Error, Result};
use crate::proto::cachestore::v1::agent_service_client::AgentServiceClient;
use crate::proto::inference::v1::inference_service_client::InferenceServiceClient;
use crate::tls::{Tls, TlsDialer};

const ROUND_TRIP: Duration = Duration::from_secs(10);
// A service that froze or a machine that vanished ends the call as UNAVAILABLE after 20 s.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// What the generated stubs speak over.
pub type Transport = InterceptedService<Channel, Bearer>;
/// The generated client of the inference service.
pub type InferenceStub = InferenceServiceClient<Transport>;
/// The generated client of the agents' service.
pub type AgentStub = AgentServiceClient<Transport>;

/// A connection to an engine, or to a store.
#[derive(Clone, Debug)]
pub struct Client {
    engine: InferenceStub,
    agents: AgentStub,
    round_trip: Duration,
    every_call: Option<Duration>,
    pub(crate) others: Arc<[Client]>,
    // Under which it holds agents; empty until it was asked.
    pub(crate) lease_owner: Arc<Mutex<String>>,
}

/// How a client connects.
#[derive(Clone)]
pub struct Builder {
    address: String,
    token: Option<String>,
    tls: Option<Tls>,
    round_trip: Duration,
}

impl Client {
    /// A client of the service on this machine at `unix:/path`, `host:port` or `[v6 address]:port`. It connects with the first
    /// call, and again after the service was gone.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for an address that is none, or that of another machine: [`Client::builder`] takes what these need.
    pub async fn connect(address: impl Into<String>) -> Result<Self> {
        Self::builder(address).connect().await
    }

    /// As [`Client::connect`], with a token, TLS or a timeout.
    pub fn builder(address: impl Into<String>) -> Builder {
        Builder { address: address.into(), token: None, tls: None, round_trip: ROUND_TRIP }
    }

    /// The same connection; every call, turns and transfers too, must end within this time. Dropping a call's future, or its
    /// events, cancels it too.
    #[must_use]
    pub fn within(&self, deadline: Duration) -> Self {
        Self { every_call: Some(deadline), ..self.clone() }
    }

    /// The same connection, which knows the other engines of its engine's store. A turn whose agent one of them holds is made there.
    /// Addresses come from the caller alone, never from an engine.
    #[must_use]
    pub fn with_engines(&self, others: impl IntoIterator<Item = Self>) -> Self {
        Self { others: others.into_iter().collect(), ..self.clone() }
    }

    /// The generated client of the inference service, for calls that have no method here: models, statistics. Its errors become
    /// an [`Error`] by `?`.
    #[must_use]
    pub fn engine(&self) -> InferenceStub {
        self.engine.clone()
    }

    /// The generated client of the agents' service.
    #[must_use]
    pub fn agents(&self) -> AgentStub {
        self.agents.clone()
    }

    /// Of a call that one answer ends at once.
    pub(crate) fn round_trip(&self) -> Deadline {
        Deadline::within(Some(self.every_call.unwrap_or(self.round_trip)))
    }

    /// Of a turn, a warm or a transfer, which may last for minutes.
    pub(crate) fn long_call(&self) -> Deadline {
        Deadline::within(self.every_call)
    }
}

impl Builder {
    /// Shows the token of a credential with every call. On a Unix socket its owner needs none.
    #[must_use]
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Encrypts the connection; beyond this machine it must be given.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// The deadline of round trips; 10 seconds if it is not given. Turns, warms and transfers have none ([`Client::within`]).
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.round_trip = timeout;
        self
    }

    /// The client. It connects with the first call.
    ///
    /// # Errors
    /// INVALID_ARGUMENT (`address`, `tls`), UNAUTHENTICATED (a token that cannot be sent).
    #[allow(clippy::unused_async)] // what it makes lives on a Tokio runtime: to await it there is to have one
    pub async fn connect(self) -> Result<Client> {
        let address = Address::parse(&self.address)?;
        if self.tls.is_none() && !address.is_loopback() {
            return Err(Error::invalid("tls", format!("{} is another machine, so TLS is needed", self.address)));
        }
        let host = match &address {
            Address::Tcp { host, .. } => host.as_str(),
            Address::Socket(_) => "localhost",
        };
        let tls = self.tls.map(|tls| tls.dialer(host)).transpose()?;
        let bearer = Bearer(self.token.map(|token| authorization(&token)).transpose()?);
        // The connector knows the address; the URI is only what is said in :authority.
        let channel = Endpoint::from_static("http://kvasir")
            .connect_timeout(CONNECT_WITHIN)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE)
            .connect_with_connector_lazy(tower::service_fn(move |_: Uri| dial(address.clone(), tls.clone())));
        Ok(Client {
            engine: InferenceServiceClient::with_interceptor(channel.clone(), bearer.clone()),
            agents: AgentServiceClient::with_interceptor(channel, bearer),
            round_trip: self.round_trip,
            every_call: None,
            others: Arc::new([]),
            lease_owner: Arc::default(),
        })
    }
}

/// Shows the token, if there is one.
#[derive(Clone)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> std::result::Result<Request<()>, Status> {
        if let Some(shown) = &self.0 {
            request.metadata_mut().insert("authorization", shown.clone());
        }
        Ok(request)
    }
}

/// Without the token and the TLS identity's key, which are secrets.
impl fmt::Debug for Builder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Builder").field("address", &self.address).finish_non_exhaustive()
    }
}

impl fmt::Debug for Bearer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(if self.0.is_some() { "Bearer(…)" } else { "Bearer(none)" })
    }
}

fn authorization(token: &str) -> Result<MetadataValue<Ascii>> {
    let refusal = || Error::bad_token("expected printable ASCII without spaces");
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(refusal());
    }
    let mut shown = MetadataValue::try_from(format!("Bearer {token}")).map_err(|_| refusal())?;
    shown.set_sensitive(true);
    Ok(shown)
}

trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

async fn dial(address: Address, tls: Option<TlsDialer>) -> std::io::Result<TokioIo<Box<dyn Wire>>> {
    let plain: Box<dyn Wire> = match address {
        Address::Socket(path) => Box::new(UnixStream::connect(path).await?),
        Address::Tcp { host, port } => {
            let stream = TcpStream::connect((host, port)).await?;
            stream.set_nodelay(true)?;
            Box::new(stream)
        }
    };
    Ok(TokioIo::new(match tls {
        None => plain,
        Some(tls) => Box::new(tls.connector.connect(tls.server_name, plain).await?),
    }))
}
