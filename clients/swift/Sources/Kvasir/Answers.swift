// What the services answer. `json` has the fields of the contract's message that have no property here.

/// An event of a turn.
public enum Event: Sendable {
    case started(Started)
    case prefillProgress(done: Int, total: Int)
    case delta(Delta)
    case finished(Finished)

    /// Nil for an event that this client does not know.
    init?(_ json: JSON) {
        guard let (kind, event) = json.object.first else { return nil }
        switch kind {
        case "started": self = .started(Started(json: event))
        case "prefill_progress": self = .prefillProgress(done: event["tokens_done"].int, total: event["tokens_total"].int)
        case "delta": self = .delta(Delta(json: event))
        case "finished": self = .finished(Finished(json: event))
        default: return nil
        }
    }
}

/// The first event: how much is reused.
public struct Started: Sendable {
    public let json: JSON
    public var requestID: String { json["request_id"].string }
    public var promptTokens: Int { json["prompt_tokens"].int }
    public var cachedTokens: Int { json["cached_tokens"].int }
    /// `CACHE_SOURCE_HOT`, …
    public var source: String { json["source"].string }
    /// `CONTINUATION_EXTENDED`, …
    public var continuation: String { json["continuation"].string }
    public var parentVersion: Int { json["parent_version"].int }
}

public struct Delta: Sendable {
    public let json: JSON
    public var text: String { json["text"].string }
    /// The model's thoughts before its answer.
    public var reasoning: String { json["reasoning_text"].string }
}

/// The last event.
public struct Finished: Sendable {
    public let json: JSON
    /// `FINISH_REASON_STOP`, …
    public var reason: String { json["reason"].string }
    /// The agent's newest version; 0 if there is none.
    public var version: Int { json["snapshot"]["version"].int }
    public var toolCalls: [ToolCall] {
        json["tool_calls"].array.map {
            ToolCall(id: $0["id"].string, name: $0["name"].string, arguments: $0["arguments_json"].string)
        }
    }
}

/// A turn as a whole.
public struct Reply: Sendable {
    public private(set) var started = Started(json: .null)
    public private(set) var text = ""
    public private(set) var reasoning = ""
    public private(set) var finished: Finished?

    public init() {}

    public mutating func add(_ event: Event) {
        switch event {
        case .started(let started): self.started = started
        case .delta(let delta):
            text += delta.text
            reasoning += delta.reasoning
        case .finished(let finished): self.finished = finished
        case .prefillProgress: break
        }
    }
}

public struct Agent: Sendable {
    public let json: JSON
    public var agentID: String { json["agent_id"].string }
    public var labels: [String: String] { json["labels"].object.mapValues(\.string) }
    /// The newest version of each line, the agent's newest first.
    public var lines: [Version] { json["lines"].array.map(Version.init) }
}

public struct Version: Sendable {
    public let json: JSON
    public var version: Int { json["version"].int }
    public var parentVersion: Int { json["parent_version"].int }
    public var baseVersion: Int { json["base_version"].int }
    public var tokenCount: Int { json["token_count"].int }
    /// `ORIGIN_TURN`, …
    public var origin: String { json["origin"].string }
    public var requestID: String { json["request_id"].string }
}
