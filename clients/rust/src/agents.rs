//! Agents by name: lists, versions, forks, rewinds, archives, and pulls from other machines.

use std::collections::HashMap;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::calls::read;
use crate::client::Client;
use crate::errors::{Error, Result};
use crate::hashes::Hasher;
use crate::proto::cachestore::v1 as pb;

// A message of an archive; gRPC's usual limit is 4 MiB.
const PIECE_BYTES: usize = 1 << 20;

/// A version of an agent. Default: the newest, of the line that was used last.
#[derive(Clone, Debug, Default)]
pub struct At {
    pub version: Option<i64>,
    /// Names a line, where the agent has several: one for each model and KV policy.
    pub kv_identity_hash: String,
}

impl From<i64> for At {
    fn from(version: i64) -> Self {
        Self { version: Some(version), ..Self::default() }
    }
}

/// Which agents to list. Default: all of the namespace.
#[derive(Clone, Debug, Default)]
pub struct AgentFilter {
    pub name_prefix: String,
    /// All must match.
    pub labels: HashMap<String, String>,
    /// How many are asked for at once; 0: the service's own.
    pub page_size: i32,
}

/// An agent of a peer.
#[derive(Clone, Debug, Default)]
pub struct Pull {
    /// A peer of the store's configuration.
    pub peer: String,
    pub agent: String,
    /// Its name here; empty: the same.
    pub local_agent: String,
    pub kv_identity_hash: String,
}

impl Client {
    /// Agents by name, all pages.
    ///
    /// # Errors
    /// As `ListAgents`' in the contract.
    pub async fn list_agents(&self, which: AgentFilter) -> Result<Vec<pb::Agent>> {
        let AgentFilter { name_prefix, labels, page_size } = which;
        let mut question = pb::ListAgentsRequest { page_size, page_token: String::new(), name_prefix, labels };
        let mut found = Vec::new();
        loop {
            let page = read!(self.round_trip(), self.agents(), list_agents, question.clone()).await?;
            found.extend(page.agents);
            if page.next_page_token.is_empty() {
                return Ok(found);
            }
            question.page_token = page.next_page_token;
        }
    }

    /// The versions of an agent's lines, newest first, all pages.
    ///
    /// # Errors
    /// As `ListSnapshots`' in the contract.
    pub async fn list_versions(&self, agent: impl Into<String>) -> Result<Vec<pb::SnapshotVersion>> {
        let mut question = pb::ListSnapshotsRequest { agent_id: agent.into(), ..Default::default() };
        let mut found = Vec::new();
        loop {
            let page = read!(self.round_trip(), self.agents(), list_snapshots, question.clone()).await?;
            found.extend(page.snapshots);
            if page.next_page_token.is_empty() {
                return Ok(found);
            }
            question.page_token = page.next_page_token;
        }
    }

    /// An agent, with the newest version of each of its lines, last used first.
    ///
    /// # Errors
    /// As `GetAgent`'s in the contract.
    pub async fn get_agent(&self, agent: impl Into<String>) -> Result<pb::Agent> {
        let answer = read!(self.round_trip(), self.agents(), get_agent, pb::GetAgentRequest { agent_id: agent.into() }).await?;
        there(answer.agent)
    }

    /// The bytes behind an agent, or behind all of the namespace if it is empty, and which of them are shared.
    ///
    /// # Errors
    /// As `GetUsage`'s in the contract.
    pub async fn usage(&self, agent: impl Into<String>) -> Result<pb::GetUsageResponse> {
        read!(self.round_trip(), self.agents(), get_usage, pb::GetUsageRequest { agent_id: agent.into() }).await
    }

    /// Changes the fields of an agent that `paths` names: `labels`, `labels.KEY`, `is_pinned`, `retained_versions`.
    ///
    /// # Errors
    /// As `UpdateAgent`'s in the contract.
    pub async fn update_agent(&self, agent: pb::Agent, paths: &[&str]) -> Result<pb::Agent> {
        let (deadline, mut stub) = (self.round_trip(), self.agents());
        let update_mask = Some(prost_types::FieldMask { paths: paths.iter().map(ToString::to_string).collect() });
        let request = pb::UpdateAgentRequest { agent: Some(agent), update_mask };
        there(deadline.once(stub.update_agent(deadline.request(request))).await?.agent)
    }

    /// Starts an agent whose first version is another's. It copies no memory.
    ///
    /// # Errors
    /// As `ForkAgent`'s in the contract.
    pub async fn fork_agent(
        &self,
        source: impl Into<String>,
        agent: impl Into<String>,
        from: impl Into<At>,
    ) -> Result<pb::Agent> {
        let (deadline, mut stub) = (self.round_trip(), self.agents());
        let At { version, kv_identity_hash } = from.into();
        let (source_agent_id, agent_id) = (source.into(), agent.into());
        let request = pb::ForkAgentRequest { source_agent_id, agent_id, kv_identity_hash, version };
        there(deadline.once(stub.fork_agent(deadline.request(request))).await?.agent)
    }

    /// Makes an old version the newest again, as a new version. `expected` is the newest one as the caller knows it: ABORTED if
    /// it is another; `None`: whatever it is.
    ///
    /// # Errors
    /// As `RollbackAgent`'s in the contract.
    pub async fn rollback_agent(
        &self,
        agent: impl Into<String>,
        to: impl Into<At>,
        expected: Option<i64>,
    ) -> Result<pb::SnapshotVersion> {
        let (deadline, mut stub) = (self.round_trip(), self.agents());
        let At { version, kv_identity_hash } = to.into();
        let request = pb::RollbackAgentRequest {
            agent_id: agent.into(),
            kv_identity_hash,
            version: version.unwrap_or_default(),
            expected_version: expected,
        };
        there(deadline.once(stub.rollback_agent(deadline.request(request))).await?.snapshot)
    }

    /// Forgets an agent, a pinned one only with `force`, and says when its bytes will be gone.
    ///
    /// # Errors
    /// As `DeleteAgent`'s in the contract.
    pub async fn delete_agent(&self, agent: impl Into<String>, force: bool) -> Result<pb::DeleteAgentResponse> {
        let (deadline, mut stub) = (self.round_trip(), self.agents());
        let request = pb::DeleteAgentRequest { agent_id: agent.into(), force };
        deadline.once(stub.delete_agent(deadline.request(request))).await
    }

    /// Writes the archive of a version, and gives the digest of its bytes. After an error what was written is no archive.
    ///
    /// # Errors
    /// As `ExportAgent`'s in the contract; UNKNOWN with an `io::Error` if it cannot be written.
    pub async fn export_agent(
        &self,
        agent: impl Into<String>,
        which: impl Into<At>,
        into: &mut (impl AsyncWrite + Unpin),
    ) -> Result<pb::Digest> {
        let (deadline, mut stub) = (self.long_call(), self.agents());
        let At { version, kv_identity_hash } = which.into();
        let request = pb::ExportAgentRequest { agent_id: agent.into(), kv_identity_hash, version };
        let exporting = async {
            let mut stream = stub.export_agent(deadline.request(request)).await?.into_inner();
            let mut hasher = Hasher::default();
            while let Some(piece) = stream.message().await? {
                hasher.write(&piece.data);
                into.write_all(&piece.data).await?;
            }
            into.flush().await?;
            Ok(hasher.digest())
        };
        deadline.hold(exporting).await
    }

    /// Reads an archive into a new version of an agent, which must be new unless `replace` is said.
    ///
    /// # Errors
    /// As `ImportAgent`'s in the contract; UNKNOWN with an `io::Error` if it cannot be read.
    pub async fn import_agent(
        &self,
        agent: impl Into<String>,
        archive: impl AsyncRead + Unpin,
        replace: bool,
    ) -> Result<pb::SnapshotVersion> {
        let (deadline, mut stub) = (self.long_call(), self.agents());
        let header = pb::ImportAgentHeader { agent_id: agent.into(), replace, ..Default::default() };
        let (pieces, received) = mpsc::channel(1);
        let importing = async {
            // Sent while the answer is waited for: a refusal comes before the archive's end.
            let answer = stub.import_agent(deadline.request(ReceiverStream::new(received)));
            tokio::pin!(answer);
            tokio::select! {
                early = &mut answer => return there(early?.into_inner().snapshot),
                fed = feed(header, archive, &pieces) => fed?,
            }
            drop(pieces);
            there(answer.await?.into_inner().snapshot)
        };
        deadline.hold(importing).await
    }

    /// Lets the store copy an agent's line from a peer of its configuration. Safe to repeat. `on_progress` may do nothing.
    ///
    /// # Errors
    /// As `PullAgent`'s in the contract.
    pub async fn pull_agent(
        &self,
        what: Pull,
        mut on_progress: impl FnMut(&pb::TransferProgress),
    ) -> Result<pb::SnapshotVersion> {
        use pb::pull_agent_response::Event;
        let (deadline, mut stub) = (self.long_call(), self.agents());
        let Pull { peer, agent, local_agent, kv_identity_hash } = what;
        let named = pb::PullAgentRequest { peer, agent_id: agent, local_agent_id: local_agent, ..Default::default() };
        let request = pb::PullAgentRequest { kv_identity_hash, ..named };
        let pulling = async {
            let mut stream = stub.pull_agent(deadline.request(request)).await?.into_inner();
            while let Some(response) = stream.message().await? {
                match response.event {
                    Some(Event::Done(done)) => return Ok(done),
                    Some(Event::Progress(progress)) => on_progress(&progress),
                    None => {}
                }
            }
            Err(Error::internal("pull", "it ended without saying how"))
        };
        deadline.hold(pulling).await
    }
}

/// Sends header and archive; ends early when nobody takes more.
async fn feed(
    header: pb::ImportAgentHeader,
    mut archive: impl AsyncRead + Unpin,
    pieces: &mpsc::Sender<pb::ImportAgentRequest>,
) -> Result<()> {
    let mut next = pb::ImportAgentRequest { header: Some(header), ..Default::default() };
    while pieces.send(next).await.is_ok() {
        let mut data = Vec::with_capacity(PIECE_BYTES);
        (&mut archive).take(PIECE_BYTES as u64).read_to_end(&mut data).await?;
        if data.is_empty() {
            break;
        }
        next = pb::ImportAgentRequest { data, ..Default::default() };
    }
    Ok(())
}

/// What an answer always has.
fn there<T>(answer: Option<T>) -> Result<T> {
    answer.ok_or_else(|| Error::internal("answer", "the service left out what it is about"))
}
