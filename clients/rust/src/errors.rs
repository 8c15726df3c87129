//! The one error of this client: what a service, gRPC, this machine's files or the client itself refused.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::time::Duration;

use tonic::{Code, Status, TimeoutExpired};
use tonic_types::StatusExt;

use crate::proto::common::v1::ErrorReason;
use crate::proto::inference::v1::Moved;

const DOMAIN: &str = "kvasir";
const REASON_PREFIX: &str = "ERROR_REASON_";

/// A result of this client.
pub type Result<T> = std::result::Result<T, Error>;

/// A refusal.
///
/// Only UNAVAILABLE and RESOURCE_EXHAUSTED are worth asking again unchanged, after [`Error::retry_after`].
/// An archive that cannot be read or written here is [`Code::Unknown`], with the [`io::Error`] as its source.
#[derive(Debug)]
pub struct Error(Box<Told>);

#[derive(Debug)]
struct Told {
    code: Code,
    reason_name: String,
    message: String,
    field: String,
    retry_after: Option<Duration>,
    metadata: HashMap<String, String>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// The gRPC code.
    #[must_use]
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// The code as gRPC's documents write it: `NOT_FOUND`.
    #[must_use]
    pub fn code_name(&self) -> &'static str {
        code_name(self.0.code)
    }

    /// The reason, for programs; the code's own if none was sent. Unspecified: one that this client does not know.
    #[must_use]
    pub fn reason(&self) -> ErrorReason {
        ErrorReason::from_str_name(&format!("{REASON_PREFIX}{}", self.0.reason_name)).unwrap_or_default()
    }

    /// The reason as it was sent, `HEAD_MOVED`, also where [`Error::reason`] does not know it; the code's name if none was sent.
    #[must_use]
    pub fn reason_name(&self) -> &str {
        &self.0.reason_name
    }

    /// What happened, for people.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The field that is wrong; empty if none was named.
    #[must_use]
    pub fn field(&self) -> &str {
        &self.0.field
    }

    /// `None` where waiting does not help, or the service said nothing about it.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// What the reason is about, by the names of the contract. A broken turn has its `request_id`: ask again with it.
    #[must_use]
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.0.metadata
    }

    pub(crate) fn invalid(field: &str, message: impl fmt::Display) -> Self {
        Self::own(Code::InvalidArgument, ErrorReason::InvalidField, field, message)
    }

    pub(crate) fn bad_token(message: impl fmt::Display) -> Self {
        Self::own(Code::Unauthenticated, ErrorReason::NoCredential, "token", message)
    }

    pub(crate) fn internal(field: &str, message: impl fmt::Display) -> Self {
        Self::own(Code::Internal, ErrorReason::Unspecified, field, message)
    }

    pub(crate) fn deadline() -> Self {
        Status::deadline_exceeded("the client's deadline is over").into()
    }

    /// The end of a stream whose rest is at another engine.
    pub(crate) fn moved(moved: Moved) -> Self {
        let text = format!("the turn went on to {:?}: resume() of a client of that engine takes the resume_token", moved.peer);
        let mut made = Self::own(Code::Unavailable, ErrorReason::TurnMoved, "", text);
        made.0.metadata.insert("peer".to_owned(), moved.peer);
        made.0.metadata.insert("resume_token".to_owned(), moved.resume_token);
        made
    }

    /// The end of a reply without its last event.
    pub(crate) fn cut() -> Self {
        Self::own(Code::Unavailable, ErrorReason::StreamCut, "", "the reply was cut")
    }

    pub(crate) fn with_request_id(mut self, request_id: &str) -> Self {
        if !request_id.is_empty() {
            self.0.metadata.insert("request_id".to_owned(), request_id.to_owned());
        }
        self
    }

    fn own(code: Code, reason: ErrorReason, field: &str, message: impl fmt::Display) -> Self {
        let reason_name = match reason {
            ErrorReason::Unspecified => code_name(code),
            known => &known.as_str_name()[REASON_PREFIX.len()..],
        };
        Self(Box::new(Told {
            code,
            reason_name: reason_name.to_owned(),
            message: if field.is_empty() { message.to_string() } else { format!("{field}: {message}") },
            field: field.to_owned(),
            retry_after: None,
            metadata: HashMap::new(),
            source: None,
        }))
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Self {
        let details = status.get_error_details();
        let info = details.error_info().filter(|info| info.domain == DOMAIN);
        let mut metadata = info.map(|info| info.metadata.clone()).unwrap_or_default();
        let violation = details.bad_request().and_then(|bad| bad.field_violations.first());
        let code = code_of(&status);
        Self(Box::new(Told {
            code,
            reason_name: info.map_or_else(|| code_name(code).to_owned(), |info| info.reason.clone()),
            message: status.message().to_owned(),
            field: match violation {
                Some(violation) => violation.field.clone(),
                None => metadata.remove("field").unwrap_or_default(),
            },
            retry_after: details.retry_info().and_then(|retry| retry.retry_delay),
            metadata,
            source: Some(Box::new(status)),
        }))
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        let mut made = Self::own(Code::Unknown, ErrorReason::Unspecified, "archive", &error);
        made.0.source = Some(Box::new(error));
        made
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "kvasir: {} ({}): {}", self.code_name(), self.0.reason_name, self.0.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

/// The code as other languages' gRPC has it.
///
/// A status that has a source was made here: the deadline was over (tonic: CANCELLED), or the connection broke (tonic: UNKNOWN,
/// INTERNAL or CANCELLED, whichever layer saw it first).
fn code_of(status: &Status) -> Code {
    let mut causes = std::iter::successors(std::error::Error::source(status), |cause| cause.source()).peekable();
    if causes.peek().is_none() {
        return status.code();
    }
    if causes.any(|cause| cause.is::<TimeoutExpired>()) {
        return Code::DeadlineExceeded;
    }
    match status.code() {
        Code::Unknown | Code::Internal | Code::Cancelled => Code::Unavailable,
        other => other,
    }
}

fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
