// What an address may be, and whether another machine can be behind it.
package org.kvasir.client;

import io.grpc.netty.shaded.io.netty.util.NetUtil;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.net.UnixDomainSocketAddress;
import java.nio.charset.StandardCharsets;

/** Where a service listens: a socket's path, or a host and a port. */
record Address(String path, String host, int port) {
  // sockaddr_un holds 104 bytes on macOS and 108 on Linux, with the NUL; one limit for both.
  private static final int MAX_SOCKET_PATH_BYTES = 100;

  static Address parse(String text) {
    if (text.startsWith("unix:")) {
      return socket(text.substring(5));
    }
    int colon = text.lastIndexOf(':');
    String host = colon < 0 ? "" : text.substring(0, colon);
    boolean isBracketed = host.startsWith("[") && host.endsWith("]");
    String bare = isBracketed ? host.substring(1, host.length() - 1) : host;
    boolean isHost = isBracketed ? NetUtil.isValidIpV6Address(bare) : bare.matches("[^:/\\[\\] ]+");
    int port = port(text.substring(colon + 1));
    if (!isHost || port == 0) {
      throw KvasirException.invalid("address", "'" + text + "': expected unix:/path, host:port or [v6 address]:port");
    }
    return new Address(null, bare, port);
  }

  boolean isSocket() {
    return path != null;
  }

  boolean isLoopback() {
    if (isSocket() || host.equals("localhost")) {
      return true;
    }
    byte[] ip = NetUtil.createByteArrayFromIpAddressString(host);
    try {
      return ip != null && java.net.InetAddress.getByAddress(ip).isLoopbackAddress();
    } catch (java.net.UnknownHostException impossible) {
      throw new IllegalStateException(impossible);
    }
  }

  SocketAddress socketAddress() {
    return isSocket() ? UnixDomainSocketAddress.of(path) : InetSocketAddress.createUnresolved(host, port);
  }

  private static Address socket(String path) {
    int bytes = path.getBytes(StandardCharsets.UTF_8).length;
    String wrong =
        !path.startsWith("/") || path.indexOf(0) >= 0 ? "expected an absolute path"
            : path.contains("%") ? "a socket's path may have no %"
                : bytes > MAX_SOCKET_PATH_BYTES ? bytes + " bytes; a socket may have " + MAX_SOCKET_PATH_BYTES : "";
    if (!wrong.isEmpty()) {
      throw KvasirException.invalid("address", "unix:" + path + ": " + wrong);
    }
    return new Address(path, null, 0);
  }

  private static int port(String text) {
    try {
      int port = Integer.parseInt(text);
      return port > 0 && port < 65536 ? port : 0;
    } catch (NumberFormatException notANumber) {
      return 0;
    }
  }
}
