// What a service streams, cancelled when it is closed.
package org.kvasir.client;

import io.grpc.Context;
import java.util.Iterator;
import java.util.function.Supplier;

/** Not for several threads at once. */
final class Pieces<T> implements Iterator<T>, AutoCloseable {
  private final Context.CancellableContext call = Context.current().withCancellation();
  private final Iterator<T> pieces;

  Pieces(Supplier<Iterator<T>> ask) {
    Context before = call.attach();
    try {
      pieces = ask.get();
    } finally {
      call.detach(before);
    }
  }

  @Override
  public boolean hasNext() {
    return pieces.hasNext();
  }

  @Override
  public T next() {
    return pieces.next();
  }

  @Override
  public void close() {
    call.cancel(null);
  }
}
