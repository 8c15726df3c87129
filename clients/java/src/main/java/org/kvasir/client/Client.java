// The connection to an engine or a store, and its calls.
package org.kvasir.client;

import io.grpc.Deadline;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.shaded.io.grpc.netty.GrpcSslContexts;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.shaded.io.netty.channel.ChannelOption;
import io.grpc.netty.shaded.io.netty.channel.EventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.nio.NioEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.socket.nio.NioDomainSocketChannel;
import io.grpc.netty.shaded.io.netty.util.concurrent.DefaultThreadFactory;
import io.grpc.stub.AbstractStub;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.Supplier;
import java.util.stream.Stream;
import javax.net.ssl.SSLException;
import org.kvasir.cachestore.v1.*;
import org.kvasir.inference.v1.CancelTurnRequest;
import org.kvasir.inference.v1.CountTokensRequest;
import org.kvasir.inference.v1.EmbedRequest;
import org.kvasir.inference.v1.EmbedResponse;
import org.kvasir.inference.v1.Finished;
import org.kvasir.inference.v1.GenerateRequest;
import org.kvasir.inference.v1.GetCapabilitiesRequest;
import org.kvasir.inference.v1.HotMemory;
import org.kvasir.inference.v1.InferenceServiceGrpc;
import org.kvasir.inference.v1.ListHotMemoriesRequest;
import org.kvasir.inference.v1.ListTurnsRequest;
import org.kvasir.inference.v1.Turn;
import org.kvasir.inference.v1.WarmRequest;
import org.kvasir.inference.v1.WarmResponse;

/**
 * Speaks to one engine ({@code unix:/path} or {@code host:port}), which also answers for the agents of its store; a store's own
 * address answers for agents too. Calls block, many threads may share a client, and what they throw is a {@link KvasirException}.
 *
 * <p>Requests that only read are asked again when the service is UNAVAILABLE, four times in all. A turn is not: give it a request
 * id, and asking again with it and the same input does nothing twice.
 */
public final class Client implements AutoCloseable {
  private final ManagedChannel channel;
  private final EventLoopGroup group;
  private final Duration roundTrip;
  private final Duration everyCall;
  private final List<Client> others;
  private final AtomicReference<String> leaseOwner; // under which the engine holds agents; empty until it was asked

  private Client(
      ManagedChannel channel,
      EventLoopGroup group,
      Duration roundTrip,
      Duration everyCall,
      List<Client> others,
      AtomicReference<String> leaseOwner) {
    this.channel = channel;
    this.group = group;
    this.roundTrip = roundTrip;
    this.everyCall = everyCall;
    this.others = others;
    this.leaseOwner = leaseOwner;
  }

  /** A client of a service on this machine. It connects with the first call. */
  public static Client connect(String address) {
    return builder(address).connect();
  }

  /** As {@link #connect}, with a token, TLS or a timeout. */
  public static Builder builder(String address) {
    return new Builder(address);
  }

  /** The same connection; every call, turns and transfers too, must end within this time. */
  public Client within(Duration deadline) {
    return new Client(channel, group, roundTrip, deadline, others, leaseOwner);
  }

  /**
   * The same connection, which knows the other engines of its engine's store. A turn whose agent one of them holds is made there.
   * Addresses come from the caller alone, never from an engine.
   */
  public Client withEngines(List<Client> others) {
    return new Client(channel, group, roundTrip, everyCall, List.copyOf(others), leaseOwner);
  }

  /** Ends the connection, and what is under way on it. */
  @Override
  public void close() {
    channel.shutdownNow();
    if (group != null) {
      group.shutdownGracefully(0, 1, TimeUnit.SECONDS);
    }
  }

  /** The generated client, for calls that have no method here; {@link KvasirException#of} types what it throws. */
  public InferenceServiceGrpc.InferenceServiceBlockingStub engine() {
    return InferenceServiceGrpc.newBlockingStub(channel);
  }

  /** The generated client of the agents' service. */
  public AgentServiceGrpc.AgentServiceBlockingStub agents() {
    return AgentServiceGrpc.newBlockingStub(channel);
  }

  /** A turn's events: Started, PrefillProgress, Deltas, Finished. Close them, also after the end. */
  public Events generate(GenerateRequest.Builder turn) {
    String id = turn.getRequestId().isEmpty() ? UUID.randomUUID().toString() : turn.getRequestId();
    return events(turn.clone().setRequestId(id).build());
  }

  /**
   * The rest of a reply that another engine began and gave to this one. The token is in the metadata of the exception that ended the
   * stream there (TURN_MOVED, HANDOVER_UNCERTAIN), and {@code peer} is that engine's name for this one.
   */
  public Events resume(String resumeToken) {
    return events(GenerateRequest.newBuilder().setResumeToken(resumeToken).build());
  }

  private Events events(GenerateRequest request) {
    Deadline ends = everyCall == null ? null : Deadline.after(TimeUnit.NANOSECONDS.convert(everyCall), TimeUnit.NANOSECONDS);
    return new Events(
        request,
        () -> engine().withDeadline(ends).generate(request),
        refusal -> holder(refusal, ends).map(holder -> () -> holder.engine().withDeadline(ends).generate(request)));
  }

  /** The engine that has the agent of a refused turn, if it is known here and answers before the turn must end. */
  private Optional<Client> holder(KvasirException refusal, Deadline ends) {
    String owner = refusal.metadata().getOrDefault("owner", "");
    if (!refusal.reasonName().equals("AGENT_HELD_ELSEWHERE") || owner.isEmpty()) {
      return Optional.empty();
    }
    // An engine that starts again keeps its name.
    return others.stream()
        .filter(each -> each.leaseOwner.get().equals(owner))
        .findFirst()
        .or(() -> others.stream().filter(each -> each.askedLeaseOwner(ends).equals(owner)).findFirst());
  }

  private String askedLeaseOwner(Deadline ends) {
    var stub = soon(engine());
    // One that hangs, as a Mac that sleeps, must not keep the turn from those behind it.
    Deadline soon = stub.getCallOptions().getDeadline().minimum(Deadline.after(2, TimeUnit.SECONDS));
    Deadline sooner = ends == null ? soon : ends.minimum(soon);
    try {
      leaseOwner.set(
          call(() -> stub.withDeadline(sooner).getCapabilities(GetCapabilitiesRequest.getDefaultInstance()).getLeaseOwner()));
      return leaseOwner.get();
    } catch (KvasirException away) {
      return "";
    }
  }

  /** {@link #generate} to its end. */
  public Reply reply(GenerateRequest.Builder turn) {
    Reply reply = new Reply();
    try (Events events = generate(turn)) {
      events.forEachRemaining(reply::add);
    }
    return reply;
  }

  /** Puts an agent's memory into the engine ahead of its next turn, and with an input also computes that prompt. */
  public WarmResponse warm(WarmRequest request) {
    return call(() -> lasting(engine()).warm(request));
  }

  /** The tokens of a prompt, or of messages after the chat template. */
  public long countTokens(CountTokensRequest request) {
    return call(() -> soon(engine()).countTokens(request).getTokens());
  }

  /** The embeddings of texts, in their order. */
  public EmbedResponse embed(EmbedRequest request) {
    return call(() -> lasting(engine()).embed(request));
  }

  /** The turns of the caller's namespace that wait or run, the oldest first. */
  public List<Turn> listTurns() {
    return call(() -> soon(engine()).listTurns(ListTurnsRequest.getDefaultInstance()).getTurnsList());
  }

  /** Those of the agents' memories that are hot, in the order asked; at most 1000 agents. */
  public List<HotMemory> listHotMemories(Iterable<String> agents) {
    ListHotMemoriesRequest request = ListHotMemoriesRequest.newBuilder().addAllAgentIds(agents).build();
    return call(() -> soon(engine()).listHotMemories(request).getMemoriesList());
  }

  /** Ends the turns of a request, whoever reads them, and tells how each choice ended. */
  public List<Finished> cancelTurn(String requestId) {
    CancelTurnRequest request = CancelTurnRequest.newBuilder().setRequestId(requestId).build();
    return call(() -> soon(engine()).cancelTurn(request).getFinishedList());
  }

  /** Agents by name, all pages. */
  public List<Agent> listAgents(ListAgentsRequest which) {
    List<Agent> found = new ArrayList<>();
    ListAgentsRequest.Builder question = which.toBuilder();
    do {
      ListAgentsResponse page = call(() -> soon(agents()).listAgents(question.build()));
      found.addAll(page.getAgentsList());
      question.setPageToken(page.getNextPageToken());
    } while (!question.getPageToken().isEmpty());
    return found;
  }

  /** The versions of an agent's lines, newest first, all pages. */
  public List<SnapshotVersion> listVersions(String agent) {
    List<SnapshotVersion> found = new ArrayList<>();
    ListSnapshotsRequest.Builder question = ListSnapshotsRequest.newBuilder().setAgentId(agent);
    do {
      ListSnapshotsResponse page = call(() -> soon(agents()).listSnapshots(question.build()));
      found.addAll(page.getSnapshotsList());
      question.setPageToken(page.getNextPageToken());
    } while (!question.getPageToken().isEmpty());
    return found;
  }

  /** An agent, with the newest version of each of its lines, last used first. */
  public Agent getAgent(String agent) {
    return call(() -> soon(agents()).getAgent(GetAgentRequest.newBuilder().setAgentId(agent).build()).getAgent());
  }

  /** The bytes behind an agent, or behind all of the namespace if it is empty, and which of them are shared. */
  public GetUsageResponse usage(String agent) {
    return call(() -> soon(agents()).getUsage(GetUsageRequest.newBuilder().setAgentId(agent).build()));
  }

  /** Changes the fields of an agent that the mask names. */
  public Agent updateAgent(UpdateAgentRequest request) {
    return call(() -> soon(agents()).updateAgent(request).getAgent());
  }

  /** Starts an agent whose first version is another's. It copies no memory. */
  public Agent forkAgent(ForkAgentRequest request) {
    return call(() -> soon(agents()).forkAgent(request).getAgent());
  }

  /** Makes an old version the newest again, as a new version. */
  public SnapshotVersion rollbackAgent(RollbackAgentRequest request) {
    return call(() -> soon(agents()).rollbackAgent(request).getSnapshot());
  }

  /** Forgets an agent, a pinned one only with force, and says when its bytes will be gone. */
  public DeleteAgentResponse deleteAgent(String agent, boolean force) {
    DeleteAgentRequest request = DeleteAgentRequest.newBuilder().setAgentId(agent).setForce(force).build();
    return call(() -> soon(agents()).deleteAgent(request));
  }

  /** Writes the archive of a version, and gives the digest of its bytes. After an error what was written is no archive. */
  public Digest exportAgent(ExportAgentRequest request, OutputStream into) throws IOException {
    Hashes.Hasher hasher = new Hashes.Hasher();
    try (Pieces<ExportAgentResponse> pieces = new Pieces<>(() -> lasting(agents()).exportAgent(request))) {
      while (call(pieces::hasNext)) {
        byte[] data = pieces.next().getData().toByteArray();
        hasher.write(data, data.length);
        into.write(data);
      }
    }
    return hasher.digest();
  }

  /** Reads an archive into a new version of an agent, which must be new unless the header says replace. */
  public SnapshotVersion importAgent(ImportAgentHeader header, InputStream archive) throws IOException, InterruptedException {
    Upload upload = new Upload(lasting(AgentServiceGrpc.newStub(channel)));
    return upload.send(header, archive);
  }

  /** Lets the store copy an agent's line from a peer of its configuration. Safe to repeat. */
  public SnapshotVersion pullAgent(PullAgentRequest request) {
    try (Pieces<PullAgentResponse> pieces = new Pieces<>(() -> lasting(agents()).pullAgent(request))) {
      while (call(pieces::hasNext)) {
        PullAgentResponse response = pieces.next();
        if (response.hasDone()) {
          return response.getDone();
        }
      }
    }
    throw KvasirException.of(Status.INTERNAL.withDescription("the pull ended without saying how"));
  }

  private <S extends AbstractStub<S>> S soon(S stub) {
    return until(stub, everyCall == null ? roundTrip : everyCall);
  }

  private <S extends AbstractStub<S>> S lasting(S stub) {
    return everyCall == null ? stub : until(stub, everyCall);
  }

  private static <S extends AbstractStub<S>> S until(S stub, Duration time) {
    return stub.withDeadlineAfter(TimeUnit.NANOSECONDS.convert(time), TimeUnit.NANOSECONDS); // toNanos fails behind 292 years
  }

  private <T> T call(Supplier<T> ask) {
    try {
      return ask.get();
    } catch (StatusRuntimeException error) {
      throw KvasirException.of(error);
    }
  }

  /** How a client connects. */
  public static final class Builder {
    private final String address;
    private Duration timeout = Duration.ofSeconds(10);
    private String token;
    private File trusted;
    private String serverName;

    private Builder(String address) {
      this.address = address;
    }

    /** Shows the token of a credential with every call. On a Unix socket its owner needs none. */
    public Builder token(String token) {
      if (!token.matches("[!-~]+")) {
        throw KvasirException.own(Status.Code.UNAUTHENTICATED, "NO_CREDENTIAL", "token", "expected printable ASCII without spaces");
      }
      this.token = token;
      return this;
    }

    /** Encrypts the connection; beyond this machine it must be given. The server's own certificate (PEM), or its authority's. */
    public Builder trust(File certificates) {
      this.trusted = certificates;
      return this;
    }

    /** The name in the server's certificate, where it is not the address's host. */
    public Builder serverName(String name) {
      this.serverName = name;
      return this;
    }

    /** The deadline of round trips. Turns, warms and transfers have none. */
    public Builder timeout(Duration timeout) {
      this.timeout = timeout;
      return this;
    }

    /** The client. It connects with the first call. */
    public Client connect() {
      Address parsed = Address.parse(address);
      if (trusted == null && !parsed.isLoopback()) {
        throw KvasirException.invalid("tls", address + " is another machine, so TLS is needed");
      }
      EventLoopGroup group = parsed.isSocket() ? new NioEventLoopGroup(1, new DefaultThreadFactory("kvasir", true)) : null;
      NettyChannelBuilder building =
          parsed.isSocket()
              ? NettyChannelBuilder.forAddress(parsed.socketAddress())
                  .eventLoopGroup(group)
                  .channelType(NioDomainSocketChannel.class, java.net.UnixDomainSocketAddress.class)
                  .withOption(ChannelOption.SO_KEEPALIVE, null) // of TCP: each connection would log a warning
                  .overrideAuthority("localhost")
              : NettyChannelBuilder.forAddress(parsed.host(), parsed.port());
      building.proxyDetector(target -> null).defaultServiceConfig(READS);
      // A service that froze or a machine that vanished ends the call as UNAVAILABLE after 20 s.
      // Without calls, too: until a new connection's service has answered, gRPC counts a waiting call as none.
      building.keepAliveTime(10, TimeUnit.SECONDS).keepAliveTimeout(10, TimeUnit.SECONDS).keepAliveWithoutCalls(true);
      if (trusted == null) {
        building.usePlaintext();
      } else {
        encrypt(building);
      }
      if (token != null) {
        Metadata shown = new Metadata();
        shown.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + token);
        building.intercept(MetadataUtils.newAttachHeadersInterceptor(shown));
      }
      return new Client(building.build(), group, timeout, null, List.of(), new AtomicReference<>(""));
    }

    private void encrypt(NettyChannelBuilder building) {
      try {
        building.sslContext(GrpcSslContexts.forClient().trustManager(trusted).build());
      } catch (SSLException | IllegalArgumentException error) {
        throw KvasirException.invalid("tls", error.getMessage());
      }
      if (serverName != null) {
        building.overrideAuthority(serverName);
      }
    }

    // Repeating these changes nothing.
    private static final Map<String, ?> READS =
        Map.of(
            "methodConfig",
            List.of(
                Map.of(
                    "name",
                    Stream.concat(
                            Stream.of(
                                    "CountTokens", "ListTurns", "ListHotMemories", "ListModels", "GetModel", "GetCapabilities", "GetStats")
                                .map(method -> Map.of("service", InferenceServiceGrpc.SERVICE_NAME, "method", method)),
                            Stream.of("ListAgents", "GetAgent", "ListSnapshots", "GetSnapshot", "GetUsage")
                                .map(method -> Map.of("service", AgentServiceGrpc.SERVICE_NAME, "method", method)))
                        .toList(),
                    "retryPolicy",
                    Map.of(
                        "maxAttempts", 4.0, "initialBackoff", "0.1s", "maxBackoff", "1s", "backoffMultiplier", 2.0,
                        "retryableStatusCodes", List.of("UNAVAILABLE")))));
  }
}
