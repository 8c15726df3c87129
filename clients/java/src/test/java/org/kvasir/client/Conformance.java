// The conformance program of the Java client: see tests/conformance/README.md for what each call takes and answers.
package org.kvasir.client;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.BufferedReader;
import java.io.File;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.stream.StreamSupport;
import org.kvasir.cachestore.v1.*;
import org.kvasir.common.v1.Message;
import org.kvasir.inference.v1.CountTokensRequest;
import org.kvasir.inference.v1.EmbedInput;
import org.kvasir.inference.v1.EmbedRequest;
import org.kvasir.inference.v1.Finished;
import org.kvasir.inference.v1.FinishReason;
import org.kvasir.inference.v1.GenerateRequest;
import org.kvasir.inference.v1.HotMemory;
import org.kvasir.inference.v1.MemoryMode;
import org.kvasir.inference.v1.WarmRequest;

final class Conformance {
  private static final Gson GSON = new GsonBuilder().serializeNulls().disableHtmlEscaping().create();
  private Client connected;

  public static void main(String[] args) throws Exception {
    Conformance program = new Conformance();
    var in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    var out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    for (String line; (line = in.readLine()) != null; ) {
      JsonObject call = JsonParser.parseString(line).getAsJsonObject();
      Map<String, Object> answer = new HashMap<>(Map.of("id", call.get("id")));
      try {
        answer.put("ok", program.answer(call));
      } catch (KvasirException error) {
        answer.put("error", refusal(error));
      }
      out.println(GSON.toJson(answer));
    }
    System.exit(0);
  }

  private Map<String, ?> answer(JsonObject call) throws Exception {
    String name = text(call, "call");
    if (name.equals("connect")) {
      return connect(call);
    }
    Client client =
        call.has("timeout_s")
            ? connected.within(Duration.ofNanos((long) (call.get("timeout_s").getAsDouble() * 1e9)))
            : connected;
    String agent = text(call, "agent_id");
    return switch (name) {
      case "count" -> count(client, call);
      case "embed" -> embed(client, call);
      case "reply" -> reply(client, call);
      case "stream" -> stream(client, call);
      case "streams" -> streams(client, call);
      case "warm" -> {
        var warm = client.warm(WarmRequest.newBuilder().setAgentId(agent).build());
        yield Map.of(
            "tokens", warm.getTokens(), "cached_tokens", warm.getCachedTokens(),
            "source", warm.getSource().name(), "version", warm.getVersion());
      }
      case "list_hot_memories" -> {
        var agents = StreamSupport.stream(call.getAsJsonArray("agent_ids").spliterator(), false).map(JsonElement::getAsString).toList();
        yield Map.of("memories", client.listHotMemories(agents).stream().map(Conformance::told).toList());
      }
      case "usage" -> {
        var usage = client.usage(agent);
        yield Map.of(
            "agent_count", usage.getAgentCount(), "snapshot_count", usage.getSnapshotCount(),
            "blob_bytes", usage.getBlobBytes(), "shared_bytes", usage.getSharedBytes());
      }
      case "list_turns" -> Map.of(
          "turns",
          client.listTurns().stream()
              .map(turn -> Map.of("request_id", turn.getRequestId(), "agent_id", turn.getAgentId(), "state", turn.getState().name()))
              .toList());
      case "cancel_turn" -> Map.of(
          "finish_reasons",
          client.cancelTurn(text(call, "request_id")).stream().map(Finished::getReason).map(FinishReason::name).toList());
      case "list_agents" -> {
        var which = ListAgentsRequest.newBuilder().setNamePrefix(text(call, "name_prefix")).setPageSize((int) number(call, "page_size"));
        yield Map.of("agent_ids", client.listAgents(which.build()).stream().map(Agent::getAgentId).toList());
      }
      case "get_agent" -> {
        Agent found = client.getAgent(agent);
        SnapshotVersion line = found.getLines(0);
        yield Map.of("agent_id", found.getAgentId(), "version", line.getVersion(), "token_count", line.getTokenCount());
      }
      case "fork" -> {
        var request = ForkAgentRequest.newBuilder().setSourceAgentId(text(call, "source_agent_id")).setAgentId(agent);
        if (call.has("version")) {
          request.setVersion(number(call, "version"));
        }
        Agent made = client.forkAgent(request.build());
        yield Map.of("agent_id", made.getAgentId(), "version", made.getLines(0).getVersion());
      }
      case "rollback" -> {
        var request = RollbackAgentRequest.newBuilder().setAgentId(agent).setVersion(number(call, "version"));
        if (call.has("expected_version")) {
          request.setExpectedVersion(number(call, "expected_version"));
        }
        yield Map.of("version", client.rollbackAgent(request.build()).getVersion());
      }
      case "delete" -> {
        client.deleteAgent(agent, isSaid(call, "force"));
        yield Map.of();
      }
      case "export" -> export(client, call);
      case "import" -> {
        var header = ImportAgentHeader.newBuilder().setAgentId(agent).setReplace(isSaid(call, "replace")).build();
        try (var archive = new FileInputStream(text(call, "file"))) {
          yield brought(client.importAgent(header, archive));
        }
      }
      case "pull" -> {
        var request = PullAgentRequest.newBuilder().setPeer(text(call, "peer")).setAgentId(agent);
        yield brought(client.pullAgent(request.setLocalAgentId(text(call, "local_agent_id")).build()));
      }
      default -> throw new IllegalArgumentException(name);
    };
  }

  private Map<String, ?> connect(JsonObject call) {
    if (connected != null) {
      connected.close();
    }
    Client.Builder builder = Client.builder(text(call, "address"));
    if (call.has("token")) {
      builder.token(text(call, "token"));
    }
    if (call.has("ca_file")) {
      builder.trust(new File(text(call, "ca_file")));
    }
    if (call.has("server_name")) {
      builder.serverName(text(call, "server_name"));
    }
    List<Client> others = new ArrayList<>();
    if (call.has("engines")) {
      call.getAsJsonArray("engines").forEach(each -> others.add(Client.connect(each.getAsString())));
    }
    connected = builder.connect().withEngines(others);
    return Map.of();
  }

  private static Map<String, ?> count(Client client, JsonObject call) {
    GenerateRequest.Builder turn = turn(call);
    var request = CountTokensRequest.newBuilder();
    if (turn.hasPrompt()) {
      request.setPrompt(turn.getPrompt());
    } else {
      request.setMessages(turn.getMessages());
    }
    return Map.of("tokens", client.countTokens(request.build()));
  }

  private static Map<String, ?> embed(Client client, JsonObject call) {
    var request = EmbedRequest.newBuilder().setModel(text(call, "model")).setTruncate(isSaid(call, "truncate"));
    call.getAsJsonArray("texts").forEach(each -> request.addInputs(EmbedInput.newBuilder().setText(each.getAsString())));
    if (call.has("dimensions")) {
      request.setDimensions((int) number(call, "dimensions"));
    }
    var answer = client.embed(request.build());
    var embeddings =
        answer.getEmbeddingsList().stream().map(each -> Map.of("values", each.getValuesList(), "tokens", each.getTokens())).toList();
    return Map.of("model", answer.getModel(), "embeddings", embeddings);
  }

  private static Map<String, ?> reply(Client client, JsonObject call) {
    Reply reply = client.reply(turn(call));
    var started = reply.started();
    Map<String, Object> told = new LinkedHashMap<>();
    told.put("text", reply.text());
    told.put("prompt_tokens", started.getPromptTokens());
    told.put("cached_tokens", started.getCachedTokens());
    told.put("source", started.getSource().name());
    told.put("parent_version", started.getParentVersion());
    told.put("version", reply.finished().getSnapshot().getVersion());
    told.put("continuation", started.getContinuation().name());
    told.put("finish_reason", reply.finished().getReason().name());
    told.put("request_id", started.getRequestId());
    return told;
  }

  private static Map<String, ?> stream(Client client, JsonObject call) {
    Reply reply = new Reply();
    int deltas = 0;
    String token = text(call, "resume_token");
    try (Events events = token.isEmpty() ? client.generate(turn(call)) : client.resume(token)) {
      while ((deltas == 0 || deltas != number(call, "cancel_after")) && events.hasNext()) {
        var event = events.next();
        deltas += event.hasDelta() ? 1 : 0;
        reply.add(event);
      }
    }
    boolean isFinished = reply.finished().getReason() != FinishReason.FINISH_REASON_UNSPECIFIED;
    long version = reply.finished().getSnapshot().getVersion();
    return Map.of("text", reply.text(), "deltas", deltas, "is_finished", isFinished, "version", version);
  }

  private static Map<String, ?> streams(Client client, JsonObject call) throws Exception {
    int count = (int) number(call, "count");
    var threads = Executors.newFixedThreadPool(count);
    try {
      var replies = new ArrayList<Future<Reply>>();
      for (int i = 0; i < count; i++) {
        replies.add(threads.submit(() -> client.reply(turn(call))));
      }
      for (var reply : replies) {
        reply.get();
      }
    } catch (ExecutionException error) {
      throw error.getCause() instanceof KvasirException refused ? refused : error;
    } finally {
      threads.shutdown();
    }
    return Map.of("finished", count);
  }

  private static Map<String, ?> told(HotMemory memory) {
    return Map.of(
        "agent_id", memory.getAgentId(), "tokens", memory.getTokens(),
        "version", memory.getVersion(), "is_stored", memory.getIsStored());
  }

  private static Map<String, ?> export(Client client, JsonObject call) throws Exception {
    var request = ExportAgentRequest.newBuilder().setAgentId(text(call, "agent_id"));
    if (call.has("version")) {
      request.setVersion(number(call, "version"));
    }
    Digest sent;
    try (var file = new FileOutputStream(text(call, "file"))) {
      sent = client.exportAgent(request.build(), file);
    }
    try (var file = new FileInputStream(text(call, "file"))) {
      Digest saved = Hashes.digestOf(file);
      if (!saved.equals(sent)) {
        throw new IllegalStateException("the file is not what was sent");
      }
      return Map.of("hash", saved.getHash(), "size_bytes", saved.getSizeBytes());
    }
  }

  private static Map<String, ?> brought(SnapshotVersion version) {
    return Map.of("version", version.getVersion(), "origin", version.getOrigin().name());
  }

  private static Map<String, ?> refusal(KvasirException error) {
    Map<String, Object> told = new LinkedHashMap<>();
    told.put("code", error.code().name());
    told.put("reason", error.reasonName());
    told.put("field", error.field());
    told.put("retry_after_s", error.retryAfter().map(pause -> pause.toMillis() / 1000.0).orElse(null));
    told.put("metadata", error.metadata());
    told.put("message", error.getMessage());
    return told;
  }

  private static GenerateRequest.Builder turn(JsonObject call) {
    GenerateRequest.Builder turn = GenerateRequest.newBuilder();
    if (call.has("messages")) {
      turn = Turns.messages(messages(call, "messages"));
    } else if (call.has("append_messages")) {
      turn = Turns.append("", messages(call, "append_messages"));
    } else if (call.has("prompt")) {
      turn = Turns.prompt(text(call, "prompt"));
    }
    turn.setAgentId(text(call, "agent_id")).setRequestId(text(call, "request_id")).setModel(text(call, "model"));
    turn.setExpectExisting(isSaid(call, "expect_existing")).setReplaceMemory(isSaid(call, "replace_memory"));
    if (call.has("n")) {
      turn.getSamplingBuilder().setN((int) number(call, "n"));
    }
    if (call.has("max_tokens")) {
      turn.getSamplingBuilder().setMaxTokens((int) number(call, "max_tokens"));
    }
    if (call.has("expected_version")) {
      turn.setExpectedVersion(number(call, "expected_version"));
    }
    if (call.has("base_version")) {
      turn.setBaseVersion(number(call, "base_version"));
    }
    if (call.has("memory_mode")) {
      turn.setMemoryMode(MemoryMode.valueOf(text(call, "memory_mode")));
    }
    if (call.has("regex")) {
      turn.setRegex(text(call, "regex"));
    }
    return turn;
  }

  private static Message[] messages(JsonObject call, String key) {
    return StreamSupport.stream(call.getAsJsonArray(key).spliterator(), false)
        .map(JsonElement::getAsJsonObject)
        .map(
            each ->
                switch (text(each, "role")) {
                  case "system" -> Turns.system(text(each, "text"));
                  case "assistant" -> Turns.assistant(text(each, "text"));
                  case "tool" -> Turns.toolResult("", text(each, "text"));
                  default -> Turns.user(text(each, "text"));
                })
        .toArray(Message[]::new);
  }

  private static String text(JsonObject from, String key) {
    return from.has(key) ? from.get(key).getAsString() : "";
  }

  private static long number(JsonObject from, String key) {
    return from.has(key) ? from.get(key).getAsLong() : 0;
  }

  private static boolean isSaid(JsonObject from, String key) {
    return from.has(key) && from.get(key).getAsBoolean();
  }
}
