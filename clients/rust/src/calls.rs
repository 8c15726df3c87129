//! One call: its deadline, and which are asked again.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tonic::{Code, Request, Response, Status};

use crate::errors::{Error, Result};

const READ_ATTEMPTS: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// When a call must have ended; `None`: it may last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn within(time: Option<Duration>) -> Self {
        Self(time.and_then(|time| Instant::now().checked_add(time)))
    }

    /// The sooner of two.
    pub(crate) fn sooner(self, other: Self) -> Self {
        Self(self.0.into_iter().chain(other.0).min())
    }

    pub(crate) fn instant(self) -> Option<Instant> {
        self.0
    }

    /// The request, which tells the service when nobody waits any more.
    pub(crate) fn request<T>(self, body: T) -> Request<T> {
        let mut request = Request::new(body);
        if let Some(ends) = self.0 {
            request.set_timeout(ends.saturating_duration_since(Instant::now()));
        }
        request
    }

    /// What the call answers, if it does in time; else it is dropped, which cancels it.
    pub(crate) async fn hold<T>(self, call: impl Future<Output = Result<T>>) -> Result<T> {
        match self.0 {
            None => call.await,
            Some(ends) => timeout_at(ends, call).await.unwrap_or_else(|_| Err(Error::deadline())),
        }
    }

    /// The answer to one question, asked once.
    pub(crate) async fn once<T>(self, call: impl Future<Output = std::result::Result<Response<T>, Status>>) -> Result<T> {
        self.hold(async { Ok(call.await?.into_inner()) }).await
    }

    /// The answer to a question that changes nothing: while the service is UNAVAILABLE it is asked again, four times in all.
    pub(crate) async fn read<Q: Clone, T, F>(self, question: Q, mut ask: impl FnMut(Request<Q>) -> F) -> Result<T>
    where
        F: Future<Output = std::result::Result<Response<T>, Status>>,
    {
        let mut pause = FIRST_PAUSE;
        for _ in 1..READ_ATTEMPTS {
            match self.once(ask(self.request(question.clone()))).await {
                Err(error) if error.code() == Code::Unavailable => self.hold(async { Ok(sleep(pause).await) }).await?,
                other => return other,
            }
            pause = LONGEST_PAUSE.min(pause * 2);
        }
        self.once(ask(self.request(question))).await
    }
}

/// `Deadline::read` through a method of a generated stub.
macro_rules! read {
    ($deadline:expr, $stub:expr, $method:ident, $question:expr) => {{
        let stub = $stub;
        $deadline.read($question, move |request| {
            let mut stub = stub.clone();
            async move { stub.$method(request).await }
        })
    }};
}

pub(crate) use read;
