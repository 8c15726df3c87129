// A turn as the gateway takes it: the body of POST /v1/agents/{agent_id}/generate. A nil takes the contract's default.

public struct Turn: Encodable, Sendable {
    public enum MemoryMode: String, Encodable, Sendable { case readWrite = "READ_WRITE", readOnly = "READ_ONLY", none = "NONE" }

    /// The whole text, template and special tokens included.
    public var prompt: String?
    /// The whole conversation.
    public var messages: [Message]?
    /// Messages that follow those that the agent remembers.
    public var appendMessages: [Message]?
    /// Nil: the loaded model.
    public var model: String?
    /// The agent's newest version as the caller knows it; 0: the agent must be new.
    public var expectedVersion: Int?
    /// Go on from this version instead of the newest.
    public var baseVersion: Int?
    /// Refuse an agent that remembers nothing yet.
    public var expectExisting: Bool?
    /// Messages of another conversation replace the agent's.
    public var replaceMemory: Bool?
    public var memoryMode: MemoryMode?
    public var sampling: Sampling?
    public var tools: [Tool]?
    /// The reply is one JSON value that this schema admits.
    public var jsonSchema: JSON?
    /// The reply matches this regular expression from end to end.
    public var regex: String?
    /// `["mode": "OFF"]`, `["budget_tokens": 100]`.
    public var thinking: JSON?
    /// Settings that the model's chat template reads.
    public var templateSettings: JSON?
    /// The reply goes on from the assistant's last message.
    public var continueFinalMessage: Bool?
    /// Remember a reply that was cancelled, as far as it came.
    public var keepPartial: Bool?
    private let stream = true

    /// Takes exactly one of the three inputs.
    public init(prompt: String? = nil, messages: [Message]? = nil, append: [Message]? = nil, maxTokens: Int? = nil) {
        self.prompt = prompt
        self.messages = messages
        appendMessages = append
        sampling = maxTokens.map { Sampling(maxTokens: $0) }
    }

    private enum CodingKeys: String, CodingKey {
        case prompt, messages, model, sampling, tools, regex, thinking, stream
        case appendMessages = "append_messages", expectedVersion = "expected_version", baseVersion = "base_version"
        case expectExisting = "expect_existing", replaceMemory = "replace_memory", memoryMode = "memory_mode"
        case jsonSchema = "json_schema", templateSettings = "template_settings", keepPartial = "keep_partial"
        case continueFinalMessage = "continue_final_message"
    }
}

public struct Sampling: Encodable, Sendable {
    public var maxTokens: Int?
    public var temperature: Double?
    public var topP: Double?
    public var topK: Int?
    public var minP: Double?
    public var seed: UInt64?
    public var stop: [String]?
    public var repetitionPenalty: Double?

    public init(maxTokens: Int? = nil, temperature: Double? = nil) {
        self.maxTokens = maxTokens
        self.temperature = temperature
    }

    private enum CodingKeys: String, CodingKey {
        case temperature, seed, stop, maxTokens = "max_tokens", topP = "top_p", topK = "top_k", minP = "min_p"
        case repetitionPenalty = "repetition_penalty"
    }
}

public struct Message: Encodable, Sendable {
    public var role: String
    public var content: String
    /// Of an assistant, as `Finished.toolCalls` has them.
    public var toolCalls: [ToolCall]?
    /// Of a tool's result.
    public var toolCallID: String?

    public init(role: String, content: String) {
        self.role = role
        self.content = content
    }

    public static func system(_ text: String) -> Self { Self(role: "system", content: text) }
    public static func user(_ text: String) -> Self { Self(role: "user", content: text) }
    public static func assistant(_ text: String) -> Self { Self(role: "assistant", content: text) }

    public static func tool(_ text: String, of call: ToolCall) -> Self {
        var message = Self(role: "tool", content: text)
        message.toolCallID = call.id
        return message
    }

    private enum CodingKeys: String, CodingKey { case role, content, toolCalls = "tool_calls", toolCallID = "tool_call_id" }
}

public struct ToolCall: Encodable, Sendable {
    public let id: String
    public let name: String
    /// JSON, as the model wrote it.
    public let arguments: String

    public func encode(to encoder: any Encoder) throws {
        let function: JSON = ["name": .string(name), "arguments": .string(arguments)]
        try JSON.object(["id": .string(id), "type": "function", "function": function]).encode(to: encoder)
    }
}

/// A function that the model may call.
public struct Tool: Encodable, Sendable {
    public var name: String
    public var description: String
    /// The JSON schema of its arguments.
    public var parameters: JSON

    public init(name: String, description: String, parameters: JSON) {
        self.name = name
        self.description = description
        self.parameters = parameters
    }

    public func encode(to encoder: any Encoder) throws {
        let function: JSON = ["name": .string(name), "description": .string(description), "parameters": parameters]
        try JSON.object(["type": "function", "function": function]).encode(to: encoder)
    }
}
