//! The conformance program of the Rust client: see tests/conformance/README.md for what each call takes and answers.

use std::io::{BufRead, Write};
use std::time::Duration;

use kvasir_client::proto::cachestore::v1::SnapshotVersion;
use kvasir_client::proto::common::v1::Message;
use kvasir_client::proto::inference::v1::{self as pb, MemoryMode, generate_response::Event};
use kvasir_client::{AgentFilter, At, Client, Error, Pull, Reply, Tls, Turn, assistant, digest_of, system, tool_result, user};
use serde_json::{Map, Value, json};
use tokio::fs::File;
use tokio::task::JoinSet;

type Answer = Result<Value, Error>;

/// One line that it is told. What is absent reads as empty.
struct Call(Map<String, Value>);

impl Call {
    fn text(&self, key: &str) -> &str {
        self.0.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    fn number(&self, key: &str) -> Option<i64> {
        self.0.get(key).and_then(Value::as_i64)
    }

    fn is_said(&self, key: &str) -> bool {
        self.0.get(key).and_then(Value::as_bool).unwrap_or_default()
    }

    fn messages(&self, key: &str) -> Option<Vec<Message>> {
        let said = |message: &Value| {
            let text = message["text"].as_str().unwrap_or_default();
            match message["role"].as_str().unwrap_or_default() {
                "system" => system(text),
                "assistant" => assistant(text),
                "tool" => tool_result("", text),
                _ => user(text),
            }
        };
        Some(self.0.get(key)?.as_array()?.iter().map(said).collect())
    }

    fn at(&self) -> At {
        At { version: self.number("version"), ..At::default() }
    }

    fn turn(&self) -> Turn {
        let mut turn = if let Some(messages) = self.messages("messages") {
            Turn::messages(messages)
        } else if let Some(messages) = self.messages("append_messages") {
            Turn::append(messages)
        } else if self.0.contains_key("prompt") {
            Turn::prompt(self.text("prompt"))
        } else {
            Turn::from(pb::GenerateRequest::default())
        };
        turn = turn.agent(self.text("agent_id")).request_id(self.text("request_id")).model(self.text("model"));
        if let Some(replies) = self.number("n") {
            turn = turn.sampling(pb::Sampling { n: i32::try_from(replies).ok(), ..Default::default() });
        }
        if let Some(tokens) = self.number("max_tokens") {
            turn = turn.max_tokens(i32::try_from(tokens).expect("a number of tokens"));
        }
        if let Some(version) = self.number("expected_version") {
            turn = turn.expected_version(version);
        }
        if self.0.contains_key("regex") {
            turn = turn.regex(self.text("regex"));
        }
        if let Some(version) = self.number("base_version") {
            turn = turn.base_version(version);
        }
        if let Some(mode) = MemoryMode::from_str_name(self.text("memory_mode")) {
            turn = turn.memory_mode(mode);
        }
        if self.is_said("expect_existing") {
            turn = turn.expect_existing();
        }
        if self.is_said("replace_memory") {
            turn = turn.replace_memory();
        }
        turn
    }
}

#[tokio::main]
async fn main() {
    let mut client = None;
    for line in std::io::stdin().lock().lines() {
        let call = Call(serde_json::from_str(&line.expect("a line of UTF-8")).expect("a JSON object"));
        let mut answer = match answer(&mut client, &call).await {
            Ok(value) => json!({ "ok": value }),
            Err(error) => json!({ "error": refusal(&error) }),
        };
        answer["id"] = call.0["id"].clone();
        let mut out = std::io::stdout().lock();
        writeln!(out, "{answer}").and_then(|()| out.flush()).expect("somebody reads");
    }
}

async fn answer(connected: &mut Option<Client>, call: &Call) -> Answer {
    if call.text("call") == "connect" {
        *connected = None;
        *connected = Some(connect(call).await?);
        return Ok(json!({}));
    }
    let mut client = connected.clone().expect("a connection");
    if let Some(seconds) = call.0.get("timeout_s").and_then(Value::as_f64) {
        client = client.within(Duration::from_secs_f64(seconds));
    }
    match call.text("call") {
        "count" => Ok(json!({ "tokens": client.count_tokens(call.turn()).await? })),
        "embed" => embed(&client, call).await,
        "reply" => reply(&client, call).await,
        "stream" => stream(&client, call).await,
        "streams" => streams(&client, call).await,
        "warm" => warm(&client, call).await,
        "list_hot_memories" => list_hot_memories(&client, call).await,
        "usage" => {
            let usage = client.usage(call.text("agent_id")).await?;
            Ok(json!({
                "agent_count": usage.agent_count,
                "snapshot_count": usage.snapshot_count,
                "blob_bytes": usage.blob_bytes,
                "shared_bytes": usage.shared_bytes,
            }))
        }
        "list_turns" => list_turns(&client).await,
        "cancel_turn" => {
            let ended = client.cancel_turn(call.text("request_id")).await?;
            let reasons: Vec<_> = ended.iter().map(|end| end.reason().as_str_name()).collect();
            Ok(json!({ "finish_reasons": reasons }))
        }
        "list_agents" => list_agents(&client, call).await,
        "get_agent" => {
            let agent = client.get_agent(call.text("agent_id")).await?;
            let line = &agent.lines[0];
            Ok(json!({ "agent_id": agent.agent_id, "version": line.version, "token_count": line.token_count }))
        }
        "fork" => {
            let agent = client.fork_agent(call.text("source_agent_id"), call.text("agent_id"), call.at()).await?;
            Ok(json!({ "agent_id": agent.agent_id, "version": agent.lines[0].version }))
        }
        "rollback" => {
            let expected = call.number("expected_version");
            let made = client.rollback_agent(call.text("agent_id"), call.at(), expected).await?;
            Ok(json!({ "version": made.version }))
        }
        "delete" => client.delete_agent(call.text("agent_id"), call.is_said("force")).await.map(|_| json!({})),
        "export" => export(&client, call).await,
        "import" => {
            let archive = File::open(call.text("file")).await?;
            client.import_agent(call.text("agent_id"), archive, call.is_said("replace")).await.map(brought)
        }
        "pull" => pull(&client, call).await.map(brought),
        other => panic!("{other}: a call of no step"),
    }
}

async fn connect(call: &Call) -> Result<Client, Error> {
    let mut builder = Client::builder(call.text("address"));
    if call.0.contains_key("token") {
        builder = builder.token(call.text("token"));
    }
    if call.0.contains_key("ca_file") {
        let mut tls = Tls::trusting(std::fs::read(call.text("ca_file"))?);
        if call.0.contains_key("server_name") {
            tls = tls.server_name(call.text("server_name"));
        }
        builder = builder.tls(tls);
    }
    let client = builder.connect().await?;
    let mut others = Vec::new();
    for address in call.0.get("engines").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
        others.push(Client::connect(address).await?);
    }
    Ok(client.with_engines(others))
}

async fn embed(client: &Client, call: &Call) -> Answer {
    use pb::embed_input::Input::Text;
    let texts = call.0["texts"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let request = pb::EmbedRequest {
        model: call.text("model").to_owned(),
        inputs: texts.map(|text| pb::EmbedInput { input: Some(Text(text.to_owned())) }).collect(),
        dimensions: call.number("dimensions").map(|number| i32::try_from(number).expect("a number of dimensions")),
        truncate: call.is_said("truncate"),
        ..Default::default()
    };
    let pb::EmbedResponse { model, embeddings } = client.embed(request).await?;
    let told = |each: pb::Embedding| json!({ "values": each.values, "tokens": each.tokens });
    Ok(json!({ "model": model, "embeddings": embeddings.into_iter().map(told).collect::<Vec<_>>() }))
}

async fn reply(client: &Client, call: &Call) -> Answer {
    let reply = client.reply(call.turn()).await?;
    let started = reply.started.clone().unwrap_or_default();
    let finished = reply.finished().cloned().unwrap_or_default();
    Ok(json!({
        "text": reply.text(),
        "prompt_tokens": started.prompt_tokens,
        "cached_tokens": started.cached_tokens,
        "source": started.source().as_str_name(),
        "parent_version": started.parent_version,
        "version": finished.snapshot.as_ref().map_or(0, |snapshot| snapshot.version),
        "continuation": started.continuation().as_str_name(),
        "finish_reason": finished.reason().as_str_name(),
        "request_id": started.request_id,
    }))
}

async fn stream(client: &Client, call: &Call) -> Answer {
    let (mut reply, mut deltas) = (Reply::default(), 0);
    let mut events = match call.text("resume_token") {
        "" => client.generate(call.turn()).await?,
        token => client.resume(token).await?,
    };
    while let Some(event) = events.next().await {
        let event = event?;
        deltas += i64::from(matches!(event, Event::Delta(_)));
        reply.add(event)?;
        if call.number("cancel_after") == Some(deltas) {
            break;
        }
    }
    drop(events);
    let version = reply.finished().and_then(|end| end.snapshot.as_ref()).map_or(0, |snapshot| snapshot.version);
    let is_finished = reply.finished().is_some();
    Ok(json!({ "text": reply.text(), "deltas": deltas, "is_finished": is_finished, "version": version }))
}

async fn streams(client: &Client, call: &Call) -> Answer {
    let mut replies = JoinSet::new();
    for _ in 0..call.number("count").unwrap_or_default() {
        let (client, turn) = (client.clone(), call.turn());
        replies.spawn(async move { client.reply(turn).await });
    }
    let mut finished = 0;
    while let Some(reply) = replies.join_next().await {
        reply.expect("a stream that does not panic")?;
        finished += 1;
    }
    Ok(json!({ "finished": finished }))
}

async fn warm(client: &Client, call: &Call) -> Answer {
    let warm = client.warm(Turn::of(call.text("agent_id"))).await?;
    let source = warm.source().as_str_name();
    Ok(json!({ "tokens": warm.tokens, "cached_tokens": warm.cached_tokens, "source": source, "version": warm.version }))
}

async fn list_hot_memories(client: &Client, call: &Call) -> Answer {
    let agents = call.0["agent_ids"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let told = |memory: pb::HotMemory| {
        let pb::HotMemory { agent_id, tokens, version, is_stored, .. } = memory;
        json!({ "agent_id": agent_id, "tokens": tokens, "version": version, "is_stored": is_stored })
    };
    let memories: Vec<_> = client.list_hot_memories(agents).await?.into_iter().map(told).collect();
    Ok(json!({ "memories": memories }))
}

async fn list_turns(client: &Client) -> Answer {
    let told = |turn: pb::Turn| {
        let state = turn.state().as_str_name();
        json!({ "request_id": turn.request_id, "agent_id": turn.agent_id, "state": state })
    };
    let turns: Vec<_> = client.list_turns().await?.into_iter().map(told).collect();
    Ok(json!({ "turns": turns }))
}

async fn list_agents(client: &Client, call: &Call) -> Answer {
    let page_size = call.number("page_size").map_or(0, |size| i32::try_from(size).expect("a page's size"));
    let which = AgentFilter { name_prefix: call.text("name_prefix").to_owned(), page_size, ..AgentFilter::default() };
    let agents = client.list_agents(which).await?;
    Ok(json!({ "agent_ids": agents.iter().map(|agent| &agent.agent_id).collect::<Vec<_>>() }))
}

async fn export(client: &Client, call: &Call) -> Answer {
    let mut file = File::create(call.text("file")).await?;
    let sent = client.export_agent(call.text("agent_id"), call.at(), &mut file).await?;
    let saved = digest_of(std::fs::File::open(call.text("file"))?)?;
    assert_eq!(saved, sent, "the file is not what was sent");
    Ok(json!({ "hash": saved.hash, "size_bytes": saved.size_bytes }))
}

async fn pull(client: &Client, call: &Call) -> Result<SnapshotVersion, Error> {
    let what = Pull {
        peer: call.text("peer").to_owned(),
        agent: call.text("agent_id").to_owned(),
        local_agent: call.text("local_agent_id").to_owned(),
        ..Pull::default()
    };
    client.pull_agent(what, |_| {}).await
}

fn brought(version: SnapshotVersion) -> Value {
    json!({ "version": version.version, "origin": version.origin().as_str_name() })
}

fn refusal(error: &Error) -> Value {
    json!({
        "code": error.code_name(),
        "reason": error.reason_name(),
        "field": error.field(),
        "retry_after_s": error.retry_after().map(|pause| pause.as_secs_f64()),
        "metadata": error.metadata(),
        "message": error.message(),
    })
}
