// The first example of README.md: an agent is told something, and remembers it.
import static org.kvasir.client.Turns.append;
import static org.kvasir.client.Turns.user;

import org.kvasir.client.Client;

public class First {
  public static void main(String[] args) {
    String socket = System.getenv("HOME") + "/.kvasir/run/engine.sock"; // what `kvasir up` listens on
    try (Client engine = Client.connect("unix:" + socket)) {
      var reply = engine.reply(append("ada", user("My name is Anna. What is my name?")));
      System.out.println(reply.text() + " " + reply.started().getCachedTokens());
    }
  }
}
