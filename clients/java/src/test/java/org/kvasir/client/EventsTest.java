// A turn that moved to another engine ends with TURN_MOVED, however its events are read.
package org.kvasir.client;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.util.List;
import java.util.Optional;
import org.junit.Test;
import org.kvasir.inference.v1.GenerateRequest;
import org.kvasir.inference.v1.GenerateResponse;
import org.kvasir.inference.v1.Moved;

public class EventsTest {
  private static final GenerateRequest TURN = GenerateRequest.newBuilder().setRequestId("r").build();

  @Test
  public void afterMovedBothWaysToAskSaySo() {
    var moved = GenerateResponse.newBuilder().setMoved(Moved.newBuilder().setPeer("b").setResumeToken("t")).build();
    try (Events events = new Events(TURN, () -> List.of(moved).iterator(), refusal -> Optional.empty())) {
      assertTrue(events.next().hasMoved());
      assertEquals("TURN_MOVED", assertThrows(KvasirException.class, events::next).reasonName());
      assertEquals("TURN_MOVED", assertThrows(KvasirException.class, events::hasNext).reasonName());
    }
  }
}
