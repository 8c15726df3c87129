// What the client refuses by itself, and what its errors have.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createReadStream } from "node:fs";
import { createServer, type ServerHttp2Stream } from "node:http2";
import { connect as connectTo, createServer as createRelay, type Socket } from "node:net";
import { test } from "node:test";
import { setTimeout as delay } from "node:timers/promises";
import { create } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import { Client, ErrorReason, KvasirError } from "@kvasir/client";
import { ErrorInfoSchema, RetryInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { DeltaSchema } from "../src/gen/kvasir/inference/v1/inference_pb.js";
import { toKvasirError } from "../src/errors.js";
import { Reply } from "../src/turns.js";

test("addresses that are refused", () => {
  const refused = {
    "": "address", nonsense: "address", "unix:relative": "address", "unix:/a%20b": "address", "1.2.3.4:99999": "address",
    "::1:5": "address", "[::1": "address", "/tmp/x:1": "address", "192.0.2.1:443": "tls", "example.org:443": "tls",
  };
  for (const [address, field] of Object.entries(refused)) {
    assert.throws(() => new Client(address), { name: "KvasirError", code: "INVALID_ARGUMENT", field }, address);
  }
  for (const address of ["unix:/tmp/x.sock", "127.0.0.1:50051", "[::1]:50051", "localhost:50051"]) new Client(address).close();
  for (const ca of ["", Buffer.alloc(0)]) assert.throws(() => new Client("example.org:443", { tls: { ca } }), { field: "tls" });
  assert.throws(() => new Client("localhost:50051", { token: "two words" }), { code: "UNAUTHENTICATED" });
});

test("errors have what the service said", () => {
  const metadata = { head_version: "7", field: "version" };
  const error = toKvasirError(new ConnectError("moved", Code.Aborted, undefined, [
    { desc: ErrorInfoSchema, value: create(ErrorInfoSchema, { domain: "kvasir", reason: "HEAD_MOVED", metadata }) },
    { desc: RetryInfoSchema, value: { retryDelay: { seconds: 1n, nanos: 500_000_000 } } },
  ]));
  assert.equal(error.reason, ErrorReason.HEAD_MOVED);
  assert.deepEqual(
    [error.code, error.message, error.field, error.retryAfterMs, error.metadata],
    ["ABORTED", "moved", "version", 1500, { head_version: "7" }],
  );
});

test("errors of others have no reason of ours", () => {
  const value = create(ErrorInfoSchema, { domain: "proxy.example", reason: "AGENT_NOT_FOUND" });
  const error = toKvasirError(new ConnectError("?", Code.NotFound, undefined, [{ desc: ErrorInfoSchema, value }]));
  assert.notEqual(error.reason, ErrorReason.AGENT_NOT_FOUND);
});

test("a socket that is not there is UNAVAILABLE, and an aborted signal CANCELLED", async () => {
  const client = new Client("unix:/nowhere/at/all.sock");
  await assert.rejects(client.forkAgent("a", "b"), { code: "UNAVAILABLE", reason: ErrorReason.UNAVAILABLE });
  await assert.rejects(client.getAgent("ada", { signal: AbortSignal.abort() }), { code: "CANCELLED" });
  client.close();
});

test("turns that are refused here", async () => {
  const client = new Client("unix:/nowhere/at/all.sock");
  const refused = async (turn: Parameters<Client["reply"]>[0], field: string) =>
    assert.rejects(client.reply(turn), (error: unknown) => error instanceof KvasirError && error.field === field);
  await refused({}, "input");
  await refused({ prompt: "a", messages: [] }, "input");
  await refused({ prompt: "a", regex: "b", jsonSchema: {} }, "response_format");
  await refused({ prompt: "a", maxTokens: 2 ** 40 }, "request");
  client.close();
});

test("a long reply that comes in one delta, as one from memory does", () => {
  const reply = new Reply();
  const tokenIds = new Array<number>(400_000).fill(7);
  reply.add({ case: "delta", value: create(DeltaSchema, { text: "x", tokenIds }) });
  assert.equal(reply.choices[0]!.tokenIds.length, tokenIds.length);
});

test("a closed client stays closed: a read that was under way is not asked again", async () => {
  let sessions = 0;
  const server = createServer().on("session", () => sessions++).listen(0, "127.0.0.1");
  await once(server, "listening");
  const client = new Client(`127.0.0.1:${(server.address() as { port: number }).port}`);
  const reading = assert.rejects(client.getAgent("ada"), { name: "KvasirError", code: "CANCELLED" });
  await once(server, "stream");
  client.close();
  await reading;
  await assert.rejects(client.getAgent("ada"), { name: "KvasirError", code: "CANCELLED" });
  assert.equal(sessions, 1);
  server.close();
});

test("close ends streams of a connection that its service has said good-bye to", async () => {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const client = new Client(`127.0.0.1:${(server.address() as { port: number }).port}`);
  const turn = assert.rejects(client.reply({ prompt: "a" }), { name: "KvasirError", code: "CANCELLED" });
  const [stream] = (await once(server, "stream")) as [ServerHttp2Stream];
  stream.session!.goaway();
  await delay(100);
  const reading = assert.rejects(client.getAgent("ada"), { name: "KvasirError", code: "CANCELLED" });
  const [later] = (await once(server, "stream")) as [ServerHttp2Stream];
  assert.notEqual(later.session, stream.session);
  client.close();
  await reading;
  await Promise.race([turn, delay(2000).then(() => assert.fail("the turn goes on"))]);
  stream.session!.destroy();
  server.close();
});

test("a service that froze after its good-bye ends its streams, too", async (context) => {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const links: [Socket, Socket][] = [];
  const relay = createRelay((from) => {
    const to = connectTo((server.address() as { port: number }).port, "127.0.0.1");
    links.push([from, to]);
    from.pipe(to).pipe(from);
  }).listen(0, "127.0.0.1");
  await once(relay, "listening");
  context.mock.timers.enable({ apis: ["setInterval", "setTimeout"] });
  const client = new Client(`127.0.0.1:${(relay.address() as { port: number }).port}`);
  let ended: unknown;
  void client.reply({ prompt: "a" }).catch((error: unknown) => (ended = error));
  const [stream] = (await once(server, "stream")) as [ServerHttp2Stream];
  stream.session!.goaway();
  await turnsOfTheLoop(1000);
  for (const [from, to] of links) from.unpipe(to), to.unpipe(from);
  context.mock.timers.tick(10_000); // a ping
  context.mock.timers.tick(10_000); // and no answer
  await turnsOfTheLoop(1000);
  assert.ok(ended instanceof KvasirError && ended.code === "UNAVAILABLE", String(ended));
  client.close();
  for (const each of links.flat()) each.destroy();
  relay.close();
  server.close();
});

test("a service that ends no TLS handshake ends its calls", async (context) => {
  const silent = createRelay().listen(0, "127.0.0.1");
  await once(silent, "listening");
  context.mock.timers.enable({ apis: ["setInterval", "setTimeout"] });
  const client = new Client(`127.0.0.1:${(silent.address() as { port: number }).port}`, { tls: {} });
  let ended: unknown;
  void client.reply({ prompt: "a" }).catch((error: unknown) => (ended = error));
  const [link] = (await once(silent, "connection")) as [Socket];
  context.mock.timers.tick(10_000);
  context.mock.timers.tick(10_000);
  await turnsOfTheLoop(1000);
  assert.ok(ended instanceof KvasirError && ended.code === "UNAVAILABLE", String(ended));
  client.close();
  link.destroy();
  silent.close();
});

test("deadlines as the service gets them", async () => {
  const got: (string | undefined)[] = [];
  let isSilent = false;
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  server.on("stream", (stream: ServerHttp2Stream, headers) => {
    stream.on("error", () => {});
    if (isSilent) return;
    got.push(headers["grpc-timeout"] as string | undefined);
    stream.respond({ ":status": 200, "content-type": "application/grpc", "grpc-status": "5" }, { endStream: true });
  });
  const client = new Client(`127.0.0.1:${(server.address() as { port: number }).port}`);
  for (const timeoutMs of [undefined, 1500.5, 99_999_999, 1e8, 2 ** 31, Infinity]) {
    await assert.rejects(client.getAgent("ada", { timeoutMs }), { code: "NOT_FOUND" });
    await assert.rejects(client.warm("ada", {}, { timeoutMs }), { code: "NOT_FOUND" });
    await assert.rejects(client.reply({ prompt: "a" }, { timeoutMs }), { code: "NOT_FOUND" });
  }
  const none = [undefined, undefined, undefined];
  const longest = ["99999999m", "99999999m", "99999999m"];
  assert.deepEqual(got, ["10000m", undefined, undefined, "1501m", "1501m", "1501m", ...longest, ...none, ...none, ...none]);
  await assert.rejects(client.getAgent("ada", { timeoutMs: NaN }), { field: "timeoutMs" });
  isSilent = true;
  for (const timeoutMs of [0, -5]) {
    await assert.rejects(client.getAgent("ada", { timeoutMs }), { code: "DEADLINE_EXCEEDED" });
    await assert.rejects(client.reply({ prompt: "a" }, { timeoutMs }), { code: "DEADLINE_EXCEEDED" });
  }
  client.close();
  server.close();
});

test("an archive that cannot be read is no refusal of the service, and ends no process", async () => {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const client = new Client(`127.0.0.1:${(server.address() as { port: number }).port}`);
  const importing = client.importAgent("ada", createReadStream("/nowhere/at/all"));
  await assert.rejects(importing, (error: unknown) =>
    error instanceof KvasirError && error.code === "UNKNOWN" && error.field === "archive" && error.message.includes("ENOENT"));
  client.close();
  server.close();
});

test("a refusal that comes before the archive's end is the service's own", async () => {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  server.on("stream", (stream: ServerHttp2Stream) => {
    const refusal = { "grpc-status": "3", "grpc-message": "no archive" };
    stream.respond({ ":status": 200, "content-type": "application/grpc", ...refusal }, { endStream: true });
  });
  const client = new Client(`127.0.0.1:${(server.address() as { port: number }).port}`);
  const pieces = Array.from({ length: 50 }, () => new Uint8Array(1 << 20));
  const thrown = await client.importAgent("ada", pieces).catch((error: unknown) => error);
  client.close();
  server.close();
  assert.ok(thrown instanceof KvasirError && thrown.code === "INVALID_ARGUMENT" && thrown.message === "no archive", String(thrown));
});

async function turnsOfTheLoop(count: number): Promise<void> {
  for (let turn = 0; turn < count; turn++) await new Promise((resolve) => setImmediate(resolve));
}
