// A turn as far as its events have arrived.
package org.kvasir.client;

import java.util.ArrayList;
import java.util.List;
import org.kvasir.inference.v1.Finished;
import org.kvasir.inference.v1.GenerateResponse;
import org.kvasir.inference.v1.Started;

/** Not for several threads at once. */
public final class Reply {
  // More than a service sends: what an answer names is made room for.
  private static final int MAX_CHOICES = 128;

  private Started started = Started.getDefaultInstance();
  private final List<StringBuilder> texts = new ArrayList<>();
  private final List<Finished> ends = new ArrayList<>();

  /** What was reused; empty until the turn has started. */
  public Started started() {
    return started;
  }

  /** The text of the first choice. */
  public String text() {
    return text(0);
  }

  /** The text of a choice, from 0; empty if nothing of it has arrived. */
  public String text(int choice) {
    return choice < texts.size() ? texts.get(choice).toString() : "";
  }

  /** How the first choice ended; its reason is UNSPECIFIED until it did. */
  public Finished finished() {
    return finished(0);
  }

  /** How a choice ended; its reason is UNSPECIFIED until it did. */
  public Finished finished(int choice) {
    return choice < ends.size() ? ends.get(choice) : Finished.getDefaultInstance();
  }

  /** Takes the next event of a turn. */
  public void add(GenerateResponse event) {
    switch (event.getEventCase()) {
      case STARTED -> started = event.getStarted();
      case DELTA -> texts.get(room(event.getDelta().getChoice())).append(event.getDelta().getText());
      case FINISHED -> ends.set(room(event.getFinished().getChoice()), event.getFinished());
      default -> { }
    }
  }

  private int room(int choice) {
    if (choice < 0 || choice >= MAX_CHOICES) {
      throw KvasirException.own(io.grpc.Status.Code.INTERNAL, "INTERNAL", "choice", "the engine sent one that was not asked for");
    }
    while (texts.size() <= choice) {
      texts.add(new StringBuilder());
      ends.add(Finished.getDefaultInstance());
    }
    return choice;
  }
}
