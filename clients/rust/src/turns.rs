//! Turns: what is asked, its events, and the reply that they make.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Sleep, sleep_until};
use tokio_stream::Stream;
use tonic::Streaming;

use crate::calls::{Deadline, read};
use crate::client::Client;
use crate::errors::{Error, Result};
use crate::proto::common::v1::{ErrorReason, Message, Part, Role, part};
use crate::proto::inference::v1 as pb;
use pb::generate_request::{Input, ResponseFormat};
use pb::generate_response::Event;

// More than a service sends: what an answer names is made room for.
const MAX_CHOICES: usize = 128;
// An engine that is well tells its name by then.
const SOON: Duration = Duration::from_secs(2);

/// A request to continue a text. What is not said takes the default of the contract.
#[derive(Clone, Debug, Default)]
pub struct Turn {
    request: pb::GenerateRequest,
}

impl Turn {
    /// No input: what [`Client::warm`] takes for an agent's memory as it is.
    pub fn of(agent: impl Into<String>) -> Self {
        Self::default().agent(agent)
    }

    /// The whole text, template and special tokens included.
    pub fn prompt(text: impl Into<String>) -> Self {
        Self::given(Input::Prompt(text.into()))
    }

    /// The whole conversation.
    pub fn messages(messages: impl IntoIterator<Item = Message>) -> Self {
        Self::given(Input::Messages(list(messages)))
    }

    /// What follows the messages that the agent remembers.
    pub fn append(messages: impl IntoIterator<Item = Message>) -> Self {
        Self::given(Input::AppendMessages(list(messages)))
    }

    /// The agent whose memory is read and extended; not said: nothing is remembered.
    #[must_use]
    pub fn agent(mut self, agent: impl Into<String>) -> Self {
        self.request.agent_id = agent.into();
        self
    }

    /// The newest version of the agent as the caller knows it; 0: the agent must be new. Not said: whatever it is.
    #[must_use]
    pub fn expected_version(mut self, version: i64) -> Self {
        self.request.expected_version = Some(version);
        self
    }

    /// Goes on from this version instead of the newest; what the turn leaves still follows the newest.
    #[must_use]
    pub fn base_version(mut self, version: i64) -> Self {
        self.request.base_version = Some(version);
        self
    }

    /// What the turn does with its agent's memory. Not said: it is read and extended.
    #[must_use]
    pub fn memory_mode(mut self, mode: pb::MemoryMode) -> Self {
        self.request.memory_mode = mode.into();
        self
    }

    /// Refuses an agent that remembers nothing yet.
    #[must_use]
    pub fn expect_existing(mut self) -> Self {
        self.request.expect_existing = true;
        self
    }

    /// Messages that begin another conversation take the place of the agent's. Else they are answered as a branch, which is not
    /// remembered.
    #[must_use]
    pub fn replace_memory(mut self) -> Self {
        self.request.replace_memory = true;
        self
    }

    /// Names the turn, so that it can be asked for again without being done twice. Not said: a new name.
    #[must_use]
    pub fn request_id(mut self, id: impl Into<String>) -> Self {
        self.request.request_id = id.into();
        self
    }

    /// A model that configuration names. Not said: the loaded one.
    #[must_use]
    pub fn model(mut self, name: impl Into<String>) -> Self {
        self.request.model = name.into();
        self
    }

    /// Tokens of the reply at most.
    #[must_use]
    pub fn max_tokens(mut self, tokens: i32) -> Self {
        self.request.sampling.get_or_insert_default().max_tokens = Some(tokens);
        self
    }

    /// How tokens are chosen; takes the place of [`Turn::max_tokens`] too.
    #[must_use]
    pub fn sampling(mut self, sampling: pb::Sampling) -> Self {
        self.request.sampling = Some(sampling);
        self
    }

    /// The reply is one JSON value that this schema admits.
    #[must_use]
    pub fn json_schema(mut self, schema: impl Into<String>) -> Self {
        self.request.response_format = Some(ResponseFormat::JsonSchema(schema.into()));
        self
    }

    /// The reply matches this regular expression from end to end.
    #[must_use]
    pub fn regex(mut self, expression: impl Into<String>) -> Self {
        self.request.response_format = Some(ResponseFormat::Regex(expression.into()));
        self
    }

    /// Tools that the template may offer to the model.
    #[must_use]
    pub fn tools(mut self, tools: impl IntoIterator<Item = pb::Tool>) -> Self {
        self.request.tools.extend(tools);
        self
    }

    fn given(input: Input) -> Self {
        Self { request: pb::GenerateRequest { input: Some(input), ..Default::default() } }
    }
}

/// For what has no method here: `keep_partial`, `priority`, `longest_gap_ms`.
impl From<pb::GenerateRequest> for Turn {
    fn from(request: pb::GenerateRequest) -> Self {
        Self { request }
    }
}

impl Client {
    /// A turn as a stream of events: Started, `PrefillProgress`, Deltas, Finished. Dropping it cancels the turn.
    ///
    /// # Errors
    /// As Generate's in the contract; `STREAM_CUT` if it ended as if it were whole, as a proxy may end it. The metadata of an error
    /// have the `request_id`. After Moved it is `TURN_MOVED`: see [`Client::resume`].
    pub async fn generate(&self, turn: Turn) -> Result<Events> {
        let mut request = turn.request;
        if request.request_id.is_empty() {
            request.request_id = new_request_id();
        }
        self.events(request).await
    }

    /// The rest of a reply that another engine began and gave to this one. The token is in the metadata of the error that ended
    /// the stream there (`TURN_MOVED`, `HANDOVER_UNCERTAIN`), and `peer` is that engine's name for this one.
    ///
    /// # Errors
    /// As Generate's in the contract; NOT_FOUND for a token that no reply waits for.
    pub async fn resume(&self, resume_token: impl Into<String>) -> Result<Events> {
        self.events(pb::GenerateRequest { resume_token: resume_token.into(), ..Default::default() }).await
    }

    async fn events(&self, request: pb::GenerateRequest) -> Result<Events> {
        let (deadline, request_id) = (self.long_call(), request.request_id.clone());
        let unfinished = request.sampling.as_ref().map_or(1, |sampling| sampling.n().max(1));
        let begun = match self.begun(request.clone(), deadline).await {
            Err(refusal) => match self.holder(&refusal, deadline).await {
                Some(holder) => holder.begun(request, deadline).await,
                None => Err(refusal),
            },
            begun => begun,
        };
        let (stream, first) = begun.map_err(|error| error.with_request_id(&request_id))?;
        let deadline = deadline.instant().map(|ends| Box::pin(sleep_until(ends)));
        Ok(Events { stream: Some(stream), first, unfinished, moved: None, deadline, request_id })
    }

    /// This engine's stream and its first event, in whose place a refusal may come.
    async fn begun(
        &self,
        request: pb::GenerateRequest,
        deadline: Deadline,
    ) -> Result<(Streaming<pb::GenerateResponse>, Option<Event>)> {
        let mut stub = self.engine();
        let mut stream = deadline.once(stub.generate(deadline.request(request))).await?;
        let first = deadline.hold(async { Ok(stream.message().await?) }).await?;
        Ok((stream, first.and_then(|response| response.event)))
    }

    /// The engine that has the agent of a refused turn, if it is known here and answers before the turn must end.
    async fn holder(&self, refusal: &Error, deadline: Deadline) -> Option<&Client> {
        let owner = refusal.metadata().get("owner").filter(|owner| !owner.is_empty())?;
        if refusal.reason() != ErrorReason::AgentHeldElsewhere {
            return None;
        }
        // An engine that starts again keeps its name.
        if let Some(known) = self.others.iter().find(|each| *each.lease_owner.lock().expect("no panic") == *owner) {
            return Some(known);
        }
        for each in self.others.iter() {
            // One that hangs, as a Mac that sleeps, must not keep the turn from those behind it.
            let soon = each.round_trip().sooner(Deadline::within(Some(SOON))).sooner(deadline);
            let asked = read!(soon, each.engine(), get_capabilities, pb::GetCapabilitiesRequest {}).await;
            if let Ok(answer) = asked {
                each.lease_owner.lock().expect("no panic").clone_from(&answer.lease_owner);
                if answer.lease_owner == *owner {
                    return Some(each);
                }
            }
        }
        None
    }

    /// [`Client::generate`] to its end.
    ///
    /// # Errors
    /// As [`Client::generate`]'s. What arrived before is lost with the reply, not with the events.
    pub async fn reply(&self, turn: Turn) -> Result<Reply> {
        let mut events = self.generate(turn).await?;
        let mut reply = Reply::default();
        while let Some(event) = events.next().await {
            reply.add(event?)?;
        }
        Ok(reply)
    }

    /// Puts an agent's memory into the engine ahead of its next turn, and with an input also computes that prompt. Of the turn
    /// only agent, model, tools and the input are looked at.
    ///
    /// # Errors
    /// As Warm's in the contract.
    pub async fn warm(&self, turn: Turn) -> Result<pb::WarmResponse> {
        use pb::warm_request::Input as Warmed;
        let pb::GenerateRequest { model, agent_id, input, tools, thinking, template_settings, ignore_unread_settings, .. } =
            turn.request;
        let input = input.map(|input| match input {
            Input::Prompt(text) => Warmed::Prompt(text),
            Input::PromptTokenIds(ids) => Warmed::PromptTokenIds(ids),
            Input::Messages(list) => Warmed::Messages(list),
            Input::AppendMessages(list) => Warmed::AppendMessages(list),
        });
        let (deadline, mut stub) = (self.long_call(), self.engine());
        let request = pb::WarmRequest { model, agent_id, input, tools, thinking, template_settings, ignore_unread_settings };
        deadline.once(stub.warm(deadline.request(request))).await
    }

    /// The tokens of a prompt, or of messages after the chat template: those of a turn with this input and no memory. Of the turn
    /// only the prompt or messages, tools and model are looked at.
    ///
    /// # Errors
    /// As `CountTokens`' in the contract; INVALID_ARGUMENT for what is appended, whose length only a memory knows.
    pub async fn count_tokens(&self, turn: Turn) -> Result<i64> {
        use pb::count_tokens_request::Input as Counted;
        let pb::GenerateRequest {
            model,
            input,
            tools,
            thinking,
            template_settings,
            ignore_unread_settings,
            continue_final_message,
            ..
        } = turn.request;
        let input = match input {
            Some(Input::Prompt(text)) => Counted::Prompt(text),
            Some(Input::PromptTokenIds(ids)) => Counted::PromptTokenIds(ids),
            Some(Input::Messages(list)) => Counted::Messages(list),
            _ => return Err(Error::invalid("input", "expected a prompt or messages")),
        };
        let input = Some(input);
        let question = pb::CountTokensRequest {
            model,
            input,
            tools,
            thinking,
            template_settings,
            ignore_unread_settings,
            continue_final_message,
        };
        Ok(read!(self.round_trip(), self.engine(), count_tokens, question).await?.tokens)
    }

    /// The turns of the caller's namespace that wait or run, the oldest first.
    ///
    /// # Errors
    /// As every call's in the contract.
    pub async fn list_turns(&self) -> Result<Vec<pb::Turn>> {
        Ok(read!(self.round_trip(), self.engine(), list_turns, pb::ListTurnsRequest {}).await?.turns)
    }

    /// Those of the agents' memories that are hot, in the order asked; at most 1000 agents.
    ///
    /// # Errors
    /// As `ListHotMemories`' in the contract.
    pub async fn list_hot_memories<A: Into<String>>(&self, agents: impl IntoIterator<Item = A>) -> Result<Vec<pb::HotMemory>> {
        let question = pb::ListHotMemoriesRequest { agent_ids: agents.into_iter().map(Into::into).collect() };
        Ok(read!(self.round_trip(), self.engine(), list_hot_memories, question).await?.memories)
    }

    /// The embeddings of the request's texts, in their order.
    ///
    /// # Errors
    /// As Embed's in the contract.
    pub async fn embed(&self, request: pb::EmbedRequest) -> Result<pb::EmbedResponse> {
        let (deadline, mut stub) = (self.long_call(), self.engine());
        deadline.once(stub.embed(deadline.request(request))).await
    }

    /// Ends the turns of a request, whoever reads them, and tells how each choice ended.
    ///
    /// # Errors
    /// As `CancelTurn`'s in the contract.
    pub async fn cancel_turn(&self, request_id: impl Into<String>) -> Result<Vec<pb::Finished>> {
        let (deadline, mut stub) = (self.round_trip(), self.engine());
        let request = pb::CancelTurnRequest { request_id: request_id.into() };
        Ok(deadline.once(stub.cancel_turn(deadline.request(request))).await?.finished)
    }
}

/// The events of a turn, as they arrive. It ends after the last choice's Finished, or after an error.
#[derive(Debug)]
pub struct Events {
    // None: it has ended.
    stream: Option<Streaming<pb::GenerateResponse>>,
    first: Option<Event>,
    // Choices whose end has not come.
    unfinished: i32,
    // Told already; the next poll is the error that says where the rest is.
    moved: Option<pb::Moved>,
    deadline: Option<Pin<Box<Sleep>>>,
    request_id: String,
}

impl Events {
    /// The next event; `None` at the end.
    pub async fn next(&mut self) -> Option<Result<Event>> {
        std::future::poll_fn(|context| Pin::new(&mut *self).poll_next(context)).await
    }

    fn poll_raw(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Event>>> {
        if let Some(moved) = self.moved.take() {
            return Poll::Ready(Some(Err(Error::moved(moved))));
        }
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        let Some(stream) = &mut self.stream else { return Poll::Ready(None) };
        loop {
            match Pin::new(&mut *stream).poll_next(context) {
                Poll::Ready(Some(Ok(pb::GenerateResponse { event: Some(event) }))) => return Poll::Ready(Some(Ok(event))),
                // An event of a newer contract.
                Poll::Ready(Some(Ok(pb::GenerateResponse { event: None }))) => {}
                Poll::Ready(Some(Err(status))) => return Poll::Ready(Some(Err(status.into()))),
                Poll::Ready(None) => return Poll::Ready((self.unfinished > 0).then(|| Err(Error::cut()))),
                Poll::Pending => break,
            }
        }
        match &mut self.deadline {
            Some(deadline) => deadline.as_mut().poll(context).map(|()| Some(Err(Error::deadline()))),
            None => Poll::Pending,
        }
    }
}

impl Stream for Events {
    type Item = Result<Event>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let polled = self.poll_raw(context);
        match &polled {
            Poll::Ready(None | Some(Err(_))) => self.stream = None,
            Poll::Ready(Some(Ok(Event::Moved(moved)))) => self.moved = Some(moved.clone()),
            Poll::Ready(Some(Ok(Event::Finished(_)))) => self.unfinished -= 1,
            _ => {}
        }
        polled.map_err(|error| error.with_request_id(&self.request_id))
    }
}

/// A turn as far as its events have arrived.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    /// `None` until the first event.
    pub started: Option<pb::Started>,
    /// By number; one, unless `n` of the sampling asked for more.
    pub choices: Vec<Choice>,
}

/// One of the replies that were asked for, as far as it has arrived.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    pub text: String,
    pub reasoning_text: String,
    pub token_ids: Vec<u32>,
    /// One for each token, if they were asked for.
    pub logprobs: Vec<pb::TokenLogprobs>,
    /// `None` until the choice ended.
    pub finished: Option<pb::Finished>,
}

impl Reply {
    /// The text of the first choice.
    #[must_use]
    pub fn text(&self) -> &str {
        self.choices.first().map_or("", |choice| &choice.text)
    }

    /// How the first choice ended; `None` until it did.
    #[must_use]
    pub fn finished(&self) -> Option<&pb::Finished> {
        self.choices.first()?.finished.as_ref()
    }

    /// Tokens of the prompt whose KV was reused, not computed; 0 until the turn has started.
    #[must_use]
    pub fn cached_tokens(&self) -> i64 {
        self.started.as_ref().map_or(0, |started| started.cached_tokens)
    }

    /// Takes the next event of a turn.
    ///
    /// # Errors
    /// INTERNAL for a choice that nobody can have asked for.
    pub fn add(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Started(started) => self.started = Some(started),
            Event::PrefillProgress(_) | Event::Moved(_) => {}
            Event::Delta(delta) => {
                let choice = self.choice(delta.choice)?;
                choice.text += &delta.text;
                choice.reasoning_text += &delta.reasoning_text;
                choice.token_ids.extend(delta.token_ids);
                choice.logprobs.extend(delta.logprobs);
            }
            Event::Finished(finished) => {
                let choice = self.choice(finished.choice)?;
                choice.finished = Some(finished);
            }
        }
        Ok(())
    }

    fn choice(&mut self, number: i32) -> Result<&mut Choice> {
        let index = usize::try_from(number).ok().filter(|index| *index < MAX_CHOICES);
        let index = index.ok_or_else(|| Error::internal("choice", "the engine sent one that was not asked for"))?;
        if self.choices.len() <= index {
            self.choices.resize_with(index + 1, Choice::default);
        }
        Ok(&mut self.choices[index])
    }
}

/// A message of the system.
pub fn system(text: impl Into<String>) -> Message {
    message(Role::System, text)
}

/// A message of the user.
pub fn user(text: impl Into<String>) -> Message {
    message(Role::User, text)
}

/// A message of the model.
pub fn assistant(text: impl Into<String>) -> Message {
    message(Role::Assistant, text)
}

/// What a tool answered to a call.
pub fn tool_result(call_id: impl Into<String>, text: impl Into<String>) -> Message {
    Message { tool_call_id: call_id.into(), ..message(Role::Tool, text) }
}

fn message(role: Role, text: impl Into<String>) -> Message {
    let part = Part { content: Some(part::Content::Text(text.into())) };
    Message { role: role.into(), parts: vec![part], ..Default::default() }
}

fn list(messages: impl IntoIterator<Item = Message>) -> pb::MessageList {
    pb::MessageList { messages: messages.into_iter().collect() }
}

/// 128 bits that the standard library's random keys make: a name that no other turn has, and no secret.
fn new_request_id() -> String {
    let half = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", half(), half())
}
