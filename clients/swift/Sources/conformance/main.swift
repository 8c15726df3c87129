// The conformance program of the Swift client: see tests/conformance/README.md for what each call takes and answers.
import Foundation
import Kvasir

nonisolated(unsafe) var connected: Client!

func answer(_ call: JSON) async throws -> JSON {
    let client = call["timeout_s"] == .null ? connected : connected.within(.seconds(call["timeout_s"].double))
    let agent = call["agent_id"].string
    switch call["call"].string {
    case "connect":
        connected = try Client(call["address"].string, token: call["token"] == .null ? nil : call["token"].string)
        return [:]
    case "reply":
        let reply = try await client!.reply(agent: agent, turn(call), requestID: requestID(call))
        return [
            "text": .string(reply.text), "prompt_tokens": .integer(reply.started.promptTokens),
            "cached_tokens": .integer(reply.started.cachedTokens), "source": .string(reply.started.source),
            "continuation": named(reply.started.continuation, "CONTINUATION_UNSPECIFIED"),
            "parent_version": .integer(reply.started.parentVersion), "version": .integer(reply.finished?.version ?? 0),
            "finish_reason": .string(reply.finished?.reason ?? ""), "request_id": .string(reply.started.requestID),
        ]
    case "stream": return try await stream(client!, agent, call)
    case "streams":
        let turns = try await withThrowingTaskGroup(of: Reply.self) { group in
            for _ in 0..<call["count"].int { group.addTask { try await client!.reply(agent: agent, turn(call)) } }
            return try await group.reduce(0) { count, reply in count + (reply.finished == nil ? 0 : 1) }
        }
        return ["finished": .integer(turns)]
    case "list_agents":
        let found = try await client!.listAgents(namePrefix: call["name_prefix"].string, pageSize: call["page_size"].int)
        return ["agent_ids": .array(found.map { .string($0.agentID) })]
    case "get_agent":
        let found = try await client!.agent(agent)
        let line = found.lines[0]
        return ["agent_id": .string(found.agentID), "version": .integer(line.version), "token_count": .integer(line.tokenCount)]
    case "fork":
        let made = try await client!.fork(call["source_agent_id"].string, to: agent, version: number(call, "version"))
        return ["agent_id": .string(made.agentID), "version": .integer(made.lines[0].version)]
    case "rollback":
        let expected = number(call, "expected_version")
        let made = try await client!.rollback(agent, to: call["version"].int, expectedVersion: expected)
        return ["version": .integer(made.version)]
    case "delete":
        try await client!.delete(agent, force: call["force"].bool)
        return [:]
    default: fatalError("no such call: \(call["call"].string)")
    }
}

/// `cancel_by`: "task" cancels the task that reads; else the loop is left.
func stream(_ client: Client, _ agent: String, _ call: JSON) async throws -> JSON {
    let reading = Task {
        var (reply, deltas) = (Reply(), 0)
        do {
            for try await event in try client.generate(agent: agent, turn(call), requestID: requestID(call)) {
                reply.add(event)
                if case .delta = event { deltas += 1 }
                guard deltas > 0, deltas == number(call, "cancel_after") else { continue }
                if call["cancel_by"] != "task" { break }
                withUnsafeCurrentTask { $0?.cancel() }
            }
        } catch is CancellationError {}
        return (reply, deltas)
    }
    let (reply, deltas) = try await reading.value
    return [
        "text": .string(reply.text), "deltas": .integer(deltas), "is_finished": .bool(reply.finished != nil),
        "version": .integer(reply.finished?.version ?? 0),
    ]
}

func turn(_ call: JSON) -> Turn {
    var turn = Turn(prompt: text(call, "prompt"), messages: messages(call, "messages"), append: messages(call, "append_messages"))
    if let tokens = number(call, "max_tokens") { turn.sampling = Sampling(maxTokens: tokens) }
    turn.model = text(call, "model")
    turn.expectedVersion = number(call, "expected_version")
    turn.baseVersion = number(call, "base_version")
    turn.expectExisting = call["expect_existing"].bool
    turn.replaceMemory = call["replace_memory"].bool
    turn.memoryMode = text(call, "memory_mode").flatMap { Turn.MemoryMode(rawValue: String($0.dropFirst("MEMORY_MODE_".count))) }
    turn.regex = text(call, "regex")
    return turn
}

func messages(_ call: JSON, _ name: String) -> [Message]? {
    call[name] == .null ? nil : call[name].array.map { Message(role: $0["role"].string, content: $0["text"].string) }
}

func text(_ call: JSON, _ name: String) -> String? { call[name] == .null ? nil : call[name].string }
func number(_ call: JSON, _ name: String) -> Int? { call[name] == .null ? nil : call[name].int }
func requestID(_ call: JSON) -> String { text(call, "request_id") ?? UUID().uuidString }
func named(_ name: String, _ unspecified: String) -> JSON { .string(name.isEmpty ? unspecified : name) }

while let line = readLine() {
    let call = try JSONDecoder().decode(JSON.self, from: Data(line.utf8))
    var told: [String: JSON] = ["id": call["id"]]
    do {
        told["ok"] = try await answer(call)
    } catch let error as KvasirError {
        told["error"] = [
            "code": .string(error.code.rawValue), "reason": .string(error.reason), "field": .string(error.field),
            "retry_after_s": error.retryAfter.map(JSON.number) ?? .null, "message": .string(error.message),
            "metadata": .object(error.metadata.mapValues(JSON.string)),
        ]
    }
    try FileHandle.standardOutput.write(contentsOf: JSONEncoder().encode(told) + Data("\n".utf8))
}
