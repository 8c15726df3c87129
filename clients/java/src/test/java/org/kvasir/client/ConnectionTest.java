// A service that froze holds no call, and a caller's archive that fails leaves no call behind.
package org.kvasir.client;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;

import io.grpc.Server;
import io.grpc.Status;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.stub.StreamObserver;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.logging.Handler;
import java.util.logging.LogRecord;
import java.util.logging.Logger;
import org.junit.Test;
import org.kvasir.cachestore.v1.AgentServiceGrpc;
import org.kvasir.cachestore.v1.ImportAgentHeader;
import org.kvasir.cachestore.v1.ImportAgentRequest;
import org.kvasir.cachestore.v1.ImportAgentResponse;

public class ConnectionTest {
  /** As of an engine that was frozen before the connection: the system accepts it, and nobody answers. */
  @Test(timeout = 90_000)
  public void aTurnOnANewConnectionToASilentServiceIsUnavailable() throws IOException {
    try (ServerSocket silent = new ServerSocket(0, 8, InetAddress.getLoopbackAddress());
        Client client = Client.connect("127.0.0.1:" + silent.getLocalPort())) {
      KvasirException refusal = assertThrows(KvasirException.class, () -> client.reply(Turns.prompt("Hello")));
      assertEquals(Status.Code.UNAVAILABLE, refusal.code());
    }
  }

  @Test(timeout = 30_000)
  public void anArchiveThatFailsUncheckedEndsItsCall() throws Exception {
    Importing service = new Importing();
    Server server = NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", 0)).addService(service).build().start();
    InputStream broken = new InputStream() {
      @Override
      public int read() {
        throw new UncheckedIOException(new IOException("torn"));
      }
    };
    try (Client client = Client.connect("127.0.0.1:" + server.getPort())) {
      var header = ImportAgentHeader.newBuilder().setAgentId("ada").build();
      assertThrows(UncheckedIOException.class, () -> client.importAgent(header, broken));
      assertEquals(Status.Code.CANCELLED, service.ended.get(10, TimeUnit.SECONDS).getCode());
    } finally {
      server.shutdownNow();
    }
  }

  @Test(timeout = 30_000)
  public void aSocketIsConnectedWithoutWarnings() {
    List<String> logged = new CopyOnWriteArrayList<>();
    Handler noting = new Handler() {
      @Override
      public void publish(LogRecord each) {
        logged.add(each.getMessage());
      }

      @Override
      public void flush() {}

      @Override
      public void close() {}
    };
    Logger.getLogger("").addHandler(noting);
    try (Client client = Client.connect("unix:/nowhere/at/all.sock")) {
      assertThrows(KvasirException.class, client::listTurns);
    } finally {
      Logger.getLogger("").removeHandler(noting);
    }
    assertEquals(List.of(), logged);
  }

  @Test(timeout = 30_000)
  public void callsOfAClosedClientAreCancelled() throws Exception {
    Importing service = new Importing();
    Server server = NettyServerBuilder.forAddress(new InetSocketAddress("127.0.0.1", 0)).addService(service).build().start();
    Client client = Client.connect("127.0.0.1:" + server.getPort());
    var header = ImportAgentHeader.newBuilder().setAgentId("ada").build();
    var underWay = CompletableFuture.runAsync(() -> {
      try {
        client.importAgent(header, InputStream.nullInputStream());
      } catch (IOException | InterruptedException unexpected) {
        throw new IllegalStateException(unexpected);
      }
    });
    try {
      assertEquals(Status.Code.OK, service.ended.get(10, TimeUnit.SECONDS).getCode());
      client.close();
      client.close();
      var ended = (KvasirException) assertThrows(ExecutionException.class, () -> underWay.get(10, TimeUnit.SECONDS)).getCause();
      var later = assertThrows(KvasirException.class, client::listTurns);
      var turn = assertThrows(KvasirException.class, () -> client.reply(Turns.prompt("Hello")));
      for (KvasirException each : List.of(ended, later, turn)) {
        assertEquals(each.getMessage(), Status.Code.CANCELLED, each.code());
      }
    } finally {
      server.shutdownNow();
    }
  }

  @Test(timeout = 30_000)
  public void theLongestDurationIsADeadlineToo() {
    try (Client client = Client.connect("unix:/nowhere/at/all.sock").within(Duration.ofSeconds(Long.MAX_VALUE))) {
      for (Runnable call : List.<Runnable>of(() -> client.listTurns(), () -> client.reply(Turns.prompt("Hello")))) {
        assertEquals(Status.Code.UNAVAILABLE, assertThrows(KvasirException.class, call::run).code());
      }
    }
  }

  private static final class Importing extends AgentServiceGrpc.AgentServiceImplBase {
    final CompletableFuture<Status> ended = new CompletableFuture<>();

    @Override
    public StreamObserver<ImportAgentRequest> importAgent(StreamObserver<ImportAgentResponse> answer) {
      return new StreamObserver<>() {
        @Override
        public void onNext(ImportAgentRequest piece) {}

        @Override
        public void onError(Throwable error) {
          ended.complete(Status.fromThrowable(error));
        }

        @Override
        public void onCompleted() {
          ended.complete(Status.OK);
        }
      };
    }
  }
}
