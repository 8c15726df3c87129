// A refusal on the wire becomes the client's typed error: its reason, field, metadata, and when to ask again.
package org.kvasir.client;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.Map;
import org.junit.Test;
import org.kvasir.common.v1.ErrorReason;

public class KvasirExceptionTest {
  @Test
  public void aRefusalHasItsReasonAndMetadata() {
    KvasirException found = received(Status.Code.ABORTED, info("kvasir", "HEAD_MOVED", Map.of("head_version", "4")));
    assertEquals(Status.Code.ABORTED, found.code());
    assertEquals(ErrorReason.ERROR_REASON_HEAD_MOVED, found.reason());
    assertEquals("HEAD_MOVED", found.reasonName());
    assertEquals(Map.of("head_version", "4"), found.metadata());
    assertTrue(found.retryAfter().isEmpty());
    assertEquals("what happened", found.getMessage());
  }

  @Test
  public void aWrongFieldIsNamedByEitherDetail() {
    var violation = BadRequest.FieldViolation.newBuilder().setField("sampling.top_p");
    Any bad = Any.pack(BadRequest.newBuilder().addFieldViolations(violation).build());
    assertEquals("sampling.top_p", received(Status.Code.INVALID_ARGUMENT, bad).field());
    KvasirException other =
        received(Status.Code.FAILED_PRECONDITION, info("kvasir", "MODEL_NOT_LOADED", Map.of("field", "model")));
    assertEquals("model", other.field());
    assertFalse(other.metadata().containsKey("field"));
  }

  @Test
  public void whenToAskAgainIsToldToTheNanosecond() {
    var delay = com.google.protobuf.Duration.newBuilder().setSeconds(1).setNanos(500_000_000);
    Any retry = Any.pack(RetryInfo.newBuilder().setRetryDelay(delay).build());
    assertEquals(Duration.ofMillis(1500), received(Status.Code.UNAVAILABLE, retry).retryAfter().orElseThrow());
  }

  @Test
  public void aReasonOfALaterServiceKeepsItsName() {
    KvasirException found = received(Status.Code.INTERNAL, info("kvasir", "NOT_YET_THOUGHT_OF", Map.of()));
    assertEquals(ErrorReason.ERROR_REASON_UNSPECIFIED, found.reason());
    assertEquals("NOT_YET_THOUGHT_OF", found.reasonName());
  }

  @Test
  public void whatIsNotKvasirsHasTheCodeAsItsReason() {
    assertEquals("INTERNAL", received(Status.Code.INTERNAL, info("elsewhere.example", "HEAD_MOVED", Map.of())).reasonName());
    KvasirException bare = KvasirException.of(Status.UNAVAILABLE.withDescription("gone").asRuntimeException());
    assertEquals("UNAVAILABLE", bare.reasonName());
    assertEquals("gone", bare.getMessage());
    Any broken = Any.pack(ErrorInfo.getDefaultInstance()).toBuilder().setValue(ByteString.copyFromUtf8("no message")).build();
    assertEquals("INTERNAL", received(Status.Code.INTERNAL, broken).reasonName());
  }

  @Test
  public void theClientsOwnRefusalsHaveTheSameForm() {
    KvasirException own = assertThrows(KvasirException.class, () -> Address.parse("nonsense"));
    assertEquals(Status.Code.INVALID_ARGUMENT, own.code());
    assertEquals(ErrorReason.ERROR_REASON_INVALID_FIELD, own.reason());
    assertEquals("address", own.field());
  }

  private static Any info(String domain, String reason, Map<String, String> metadata) {
    return Any.pack(ErrorInfo.newBuilder().setDomain(domain).setReason(reason).putAllMetadata(metadata).build());
  }

  private static KvasirException received(Status.Code code, Any... details) {
    var told = com.google.rpc.Status.newBuilder().setCode(code.value()).setMessage("what happened");
    for (Any detail : details) {
      told.addDetails(detail);
    }
    return KvasirException.of(StatusProto.toStatusRuntimeException(told.build()));
  }
}
