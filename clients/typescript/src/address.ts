/** Addresses of services, as people write them: unix:/path, host:port, [v6 address]:port. */
import { isIP } from "node:net";
import { invalid } from "./errors.js";

/** A Unix socket's path, or a host and port. */
export type Address = { socketPath: string } | { host: string; port: number };

// sockaddr_un holds 104 bytes on macOS and 108 on Linux, with the NUL; one limit for both.
const MAX_SOCKET_PATH_BYTES = 100;

/** Throws a KvasirError for text that is no address. */
export function parseAddress(text: string): Address {
  if (text.startsWith("unix:")) return { socketPath: socketPath(text.slice("unix:".length)) };
  const [, v6, name, digits] = /^(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/[\]]+)):(\d{1,5})$/.exec(text) ?? [];
  const host = v6 ?? name;
  const port = Number(digits);
  if (host === undefined || port < 1 || port > 65535 || (v6 !== undefined && isIP(v6) !== 6)) {
    throw invalid("address", `${JSON.stringify(text)}: expected unix:/path, host:port or [v6 address]:port`);
  }
  return { host, port };
}

/** Whether no other machine can be behind it. A name other than localhost could resolve to anything. */
export function isLoopback(address: Address): boolean {
  if ("socketPath" in address) return true;
  const { host } = address;
  return host === "localhost" || host === "::1" || (isIP(host) === 4 && host.startsWith("127."));
}

/** The URL whose authority gRPC sends. */
export function baseUrl(address: Address, isTls: boolean): string {
  const scheme = isTls ? "https" : "http";
  if ("socketPath" in address) return `${scheme}://localhost`;
  return `${scheme}://${address.host.includes(":") ? `[${address.host}]` : address.host}:${address.port}`;
}

function socketPath(path: string): string {
  if (!path.startsWith("/") || path.includes("\0")) {
    throw invalid("address", `unix:${JSON.stringify(path)}: expected an absolute path`);
  }
  if (path.includes("%")) throw invalid("address", `unix:${path}: a socket's path may have no %`);
  const bytes = Buffer.byteLength(path);
  if (bytes > MAX_SOCKET_PATH_BYTES) {
    throw invalid("address", `unix:${path}: ${bytes} bytes; a socket may have ${MAX_SOCKET_PATH_BYTES}`);
  }
  return path;
}
