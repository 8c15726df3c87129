// An archive on its way to a service, as fast as the service takes it.
package org.kvasir.client;

import com.google.protobuf.UnsafeByteOperations;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import java.io.IOException;
import java.io.InputStream;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Semaphore;
import org.kvasir.cachestore.v1.AgentServiceGrpc;
import org.kvasir.cachestore.v1.ImportAgentHeader;
import org.kvasir.cachestore.v1.ImportAgentRequest;
import org.kvasir.cachestore.v1.ImportAgentResponse;
import org.kvasir.cachestore.v1.SnapshotVersion;

/** For one import. */
final class Upload implements ClientResponseObserver<ImportAgentRequest, ImportAgentResponse> {
  // A message of an archive; gRPC's usual limit is 4 MiB.
  private static final int PIECE_BYTES = 1 << 20;

  private final CompletableFuture<ImportAgentResponse> answer = new CompletableFuture<>();
  // Given when more may be sent, and when the answer is there.
  private final Semaphore mayGoOn = new Semaphore(0);
  private ClientCallStreamObserver<ImportAgentRequest> pieces;

  Upload(AgentServiceGrpc.AgentServiceStub stub) {
    stub.importAgent(this);
  }

  SnapshotVersion send(ImportAgentHeader header, InputStream archive) throws IOException, InterruptedException {
    try {
      pieces.onNext(ImportAgentRequest.newBuilder().setHeader(header).build());
      for (byte[] data; isWanted() && (data = archive.readNBytes(PIECE_BYTES)).length > 0; ) {
        pieces.onNext(ImportAgentRequest.newBuilder().setData(UnsafeByteOperations.unsafeWrap(data)).build());
      }
      if (!answer.isDone()) {
        pieces.onCompleted();
      }
      return answer.get().getSnapshot();
    } catch (ExecutionException error) {
      throw KvasirException.of((StatusRuntimeException) error.getCause());
    } catch (IOException | InterruptedException | RuntimeException error) {
      pieces.cancel("the archive could not be read", error);
      throw error;
    }
  }

  /** Waits until more may be sent; false if the service has answered before the end. */
  private boolean isWanted() throws InterruptedException {
    while (!answer.isDone() && !pieces.isReady()) {
      mayGoOn.acquire();
    }
    return !answer.isDone();
  }

  @Override
  public void beforeStart(ClientCallStreamObserver<ImportAgentRequest> stream) {
    pieces = stream;
    stream.setOnReadyHandler(mayGoOn::release);
  }

  @Override
  public void onNext(ImportAgentResponse response) {
    answer.complete(response);
    mayGoOn.release();
  }

  @Override
  public void onError(Throwable error) {
    answer.completeExceptionally(Status.fromThrowable(error).asRuntimeException(Status.trailersFromThrowable(error)));
    mayGoOn.release();
  }

  @Override
  public void onCompleted() {
    answer.completeExceptionally(Status.INTERNAL.withDescription("the import ended without an answer").asRuntimeException());
    mayGoOn.release();
  }
}
