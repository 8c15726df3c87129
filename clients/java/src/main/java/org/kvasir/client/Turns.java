// Short ways to a turn's request.
package org.kvasir.client;

import java.util.List;
import org.kvasir.common.v1.Message;
import org.kvasir.common.v1.Part;
import org.kvasir.common.v1.Role;
import org.kvasir.inference.v1.GenerateRequest;
import org.kvasir.inference.v1.MessageList;

/** Requests are the contract's own; these begin one, and its builder has the rest. */
public final class Turns {
  private Turns() {}

  /** The whole text, template and special tokens included. */
  public static GenerateRequest.Builder prompt(String text) {
    return GenerateRequest.newBuilder().setPrompt(text);
  }

  /** The whole conversation. */
  public static GenerateRequest.Builder messages(Message... messages) {
    return GenerateRequest.newBuilder().setMessages(list(messages));
  }

  /** What follows the messages that the agent remembers. */
  public static GenerateRequest.Builder append(String agent, Message... messages) {
    return GenerateRequest.newBuilder().setAgentId(agent).setAppendMessages(list(messages));
  }

  public static Message system(String text) {
    return message(Role.ROLE_SYSTEM, text).build();
  }

  public static Message user(String text) {
    return message(Role.ROLE_USER, text).build();
  }

  public static Message assistant(String text) {
    return message(Role.ROLE_ASSISTANT, text).build();
  }

  /** What a tool answered to a call. */
  public static Message toolResult(String callId, String text) {
    return message(Role.ROLE_TOOL, text).setToolCallId(callId).build();
  }

  private static Message.Builder message(Role role, String text) {
    return Message.newBuilder().setRole(role).addParts(Part.newBuilder().setText(text));
  }

  private static MessageList list(Message... messages) {
    return MessageList.newBuilder().addAllMessages(List.of(messages)).build();
  }
}
