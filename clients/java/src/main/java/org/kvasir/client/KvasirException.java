// The one refusal of this client: of a service, of gRPC, or of the client itself.
package org.kvasir.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import org.kvasir.common.v1.ErrorReason;
import org.kvasir.inference.v1.Moved;

/** A refusal. Only UNAVAILABLE and RESOURCE_EXHAUSTED are worth asking again unchanged, after {@link #retryAfter()}. */
public final class KvasirException extends RuntimeException {
  private static final long serialVersionUID = 1;
  private static final String DOMAIN = "kvasir";
  private static final String PREFIX = "ERROR_REASON_";
  // gRPC's words for the calls of a channel that close() ended, or that come later. It calls them UNAVAILABLE, which programs ask again.
  private static final Set<String> CLOSED = Set.of("Channel shutdownNow invoked", "Channel shutdown invoked");

  private final Status.Code code;
  private String reasonName;
  private String field = "";
  private Duration retryAfter;
  private final Map<String, String> metadata = new HashMap<>();

  private KvasirException(Status.Code code, String message, Throwable cause) {
    super(message, cause);
    this.code = code;
    this.reasonName = code.name();
  }

  public Status.Code code() {
    return code;
  }

  /** The reason, for programs; the code's own if none was sent. UNSPECIFIED: one that this client does not know. */
  public ErrorReason reason() {
    try {
      return ErrorReason.valueOf(PREFIX + reasonName);
    } catch (IllegalArgumentException unknown) {
      return ErrorReason.ERROR_REASON_UNSPECIFIED;
    }
  }

  /** The reason as it was sent, {@code HEAD_MOVED}, also where {@link #reason()} does not know it. */
  public String reasonName() {
    return reasonName;
  }

  /** The field that is wrong; empty if none was named. */
  public String field() {
    return field;
  }

  /** Empty where waiting does not help, or the service said nothing about it. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(retryAfter);
  }

  /** What the reason is about. A broken turn has its {@code request_id}: ask again with it. */
  public Map<String, String> metadata() {
    return Map.copyOf(metadata);
  }

  /** The typed error of a failed call of a generated stub. */
  public static KvasirException of(StatusRuntimeException error) {
    return of(error.getStatus(), StatusProto.fromThrowable(error), error);
  }

  static KvasirException of(Status status) {
    return of(status.asRuntimeException());
  }

  static KvasirException invalid(String field, String message) {
    return own(Status.Code.INVALID_ARGUMENT, "INVALID_FIELD", field, message);
  }

  static KvasirException own(Status.Code code, String reason, String field, String message) {
    KvasirException made = new KvasirException(code, field + ": " + message, null);
    made.reasonName = reason;
    made.field = field;
    return made;
  }

  /** The end of a stream whose rest is at another engine. */
  static KvasirException moved(Moved moved) {
    String text = "the turn went on to '" + moved.getPeer() + "': resume of a client of that engine takes the resume_token";
    KvasirException made = new KvasirException(Status.Code.UNAVAILABLE, text, null);
    made.reasonName = "TURN_MOVED";
    made.metadata.putAll(Map.of("peer", moved.getPeer(), "resume_token", moved.getResumeToken()));
    return made;
  }

  /** The end of a reply whose stream ended as if it were whole, as a proxy may end it. */
  static KvasirException cut() {
    KvasirException made = new KvasirException(Status.Code.UNAVAILABLE, "the reply was cut", null);
    made.reasonName = "STREAM_CUT";
    return made;
  }

  KvasirException withRequestId(String requestId) {
    if (!requestId.isEmpty()) {
      metadata.put("request_id", requestId);
    }
    return this;
  }

  private static KvasirException of(Status status, com.google.rpc.Status told, Throwable cause) {
    if (status.getDescription() != null && CLOSED.contains(status.getDescription())) {
      return new KvasirException(Status.Code.CANCELLED, "the client is closed", cause);
    }
    String message = status.getDescription() == null ? status.getCode().name() : status.getDescription();
    KvasirException made = new KvasirException(status.getCode(), message, cause);
    try {
      for (Any detail : told == null ? java.util.List.<Any>of() : told.getDetailsList()) {
        made.take(detail);
      }
    } catch (InvalidProtocolBufferException malformed) {
      made.addSuppressed(malformed);
    }
    String field = made.metadata.remove("field");
    if (made.field.isEmpty() && field != null) {
      made.field = field;
    }
    return made;
  }

  private void take(Any detail) throws InvalidProtocolBufferException {
    if (detail.is(ErrorInfo.class)) {
      ErrorInfo info = detail.unpack(ErrorInfo.class);
      if (info.getDomain().equals(DOMAIN)) {
        reasonName = info.getReason();
        metadata.putAll(info.getMetadataMap());
      }
    } else if (detail.is(BadRequest.class)) {
      BadRequest bad = detail.unpack(BadRequest.class);
      field = bad.getFieldViolationsCount() == 0 ? "" : bad.getFieldViolations(0).getField();
    } else if (detail.is(RetryInfo.class)) {
      var delay = detail.unpack(RetryInfo.class).getRetryDelay();
      retryAfter = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
    }
  }
}
