// The events of a turn, as they arrive.
package org.kvasir.client;

import io.grpc.StatusRuntimeException;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Optional;
import java.util.function.Function;
import java.util.function.Supplier;
import org.kvasir.inference.v1.GenerateRequest;
import org.kvasir.inference.v1.GenerateResponse;
import org.kvasir.inference.v1.Moved;

/**
 * Ends after the last choice's Finished, or with a {@link KvasirException}; after Moved it is TURN_MOVED: see {@link Client#resume}; if the stream
 * ended before, STREAM_CUT.
 * To close it earlier cancels the turn.
 */
public final class Events implements Iterator<GenerateResponse>, AutoCloseable {
  private Pieces<GenerateResponse> events;
  private final String requestId;
  private Function<KvasirException, Optional<Supplier<Iterator<GenerateResponse>>>> elsewhere; // null: the turn has its engine
  private Moved moved; // told already: the rest is elsewhere
  private int unfinished; // choices whose end has not come

  /** {@code elsewhere}: the call to make instead, if the turn is refused so before it begins. */
  Events(
      GenerateRequest request,
      Supplier<Iterator<GenerateResponse>> generate,
      Function<KvasirException, Optional<Supplier<Iterator<GenerateResponse>>>> elsewhere) {
    this.requestId = request.getRequestId();
    this.unfinished = Math.max(request.getSampling().getN(), 1);
    this.elsewhere = elsewhere;
    this.events = new Pieces<>(generate);
  }

  @Override
  public boolean hasNext() {
    checkNotMoved();
    boolean hasNext = typed(() -> events.hasNext());
    if (!hasNext && unfinished > 0) {
      throw KvasirException.cut().withRequestId(requestId);
    }
    return hasNext;
  }

  @Override
  public GenerateResponse next() {
    if (!hasNext()) {
      throw new NoSuchElementException();
    }
    GenerateResponse event = events.next();
    elsewhere = null;
    unfinished -= event.hasFinished() ? 1 : 0;
    moved = event.hasMoved() ? event.getMoved() : null;
    return event;
  }

  @Override
  public void close() {
    events.close();
  }

  private void checkNotMoved() {
    if (moved != null) {
      throw KvasirException.moved(moved).withRequestId(requestId);
    }
  }

  private <T> T typed(Supplier<T> step) {
    try {
      return step.get();
    } catch (StatusRuntimeException error) {
      KvasirException refusal = KvasirException.of(error).withRequestId(requestId);
      var there = elsewhere == null ? Optional.<Supplier<Iterator<GenerateResponse>>>empty() : elsewhere.apply(refusal);
      elsewhere = null;
      events.close();
      events = new Pieces<>(there.orElseThrow(() -> refusal));
      return typed(step);
    }
  }
}
