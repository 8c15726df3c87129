// The client of Kvasir's gateway: turns and memories of agents, over HTTP.
import Foundation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

public struct Client: Sendable {
    private static let roundTrip = Duration.seconds(10)
    private static let attempts = 4
    private static let firstPause = Duration.milliseconds(100)

    private let base: String
    private let token: String?
    private let connection = Connection()
    private var limit: Duration?

    /// `http://127.0.0.1:8642`, or a proxy's `https://…`; `host:port` is http. A token's surrounding space is left out.
    public init(_ address: String, token: String? = nil) throws {
        base = try Self.checked(address)
        self.token = token?.trimmingCharacters(in: .whitespacesAndNewlines)
        if let token = self.token, token.isEmpty || !token.utf8.allSatisfy({ (0x21...0x7e).contains($0) }) {
            throw KvasirError(.unauthenticated, "expected printable ASCII", reason: "NO_CREDENTIAL", field: "token")
        }
    }

    /// The same connections, with a deadline for every call. Without it round trips have 10 s and turns none.
    public func within(_ limit: Duration) -> Client {
        var client = self
        client.limit = limit
        return client
    }

    /// A turn of an agent. A retry with the same request ID and input is answered from memory, and not done twice.
    public func generate(agent: String, _ turn: Turn, requestID: String = UUID().uuidString) throws -> Events {
        // Foundation leaves out a header that is no line, and a retry without its ID is another turn.
        guard (1...128).contains(requestID.utf8.count), requestID.utf8.allSatisfy({ (0x20...0x7e).contains($0) }) else {
            throw Self.wrong("request_id", "expected 1 to 128 printable ASCII characters")
        }
        var request = try request("POST", [agent, "generate"], body: turn)
        request.setValue(requestID, forHTTPHeaderField: "x-request-id")
        return Events(requestID: requestID) { [request, connection, limit] in
            connection.send(request, until: limit.map { .now + $0 })
        }
    }

    /// A turn to its end.
    public func reply(agent: String, _ turn: Turn, requestID: String = UUID().uuidString) async throws -> Reply {
        var reply = Reply()
        for try await event in try generate(agent: agent, turn, requestID: requestID) { reply.add(event) }
        return reply
    }

    /// All agents whose names begin so; `pageSize` of them in a request, 0: as the service likes.
    public func listAgents(namePrefix: String = "", pageSize: Int = 0) async throws -> [Agent] {
        try await pages(of: "agents", [], ["name_prefix": namePrefix, "page_size": String(pageSize)]).map(Agent.init)
    }

    public func agent(_ name: String) async throws -> Agent {
        Agent(json: try await call("GET", [name]))
    }

    /// An agent's versions, the newest first.
    public func versions(of agent: String) async throws -> [Version] {
        try await pages(of: "snapshots", [agent, "versions"]).map(Version.init)
    }

    /// A new agent with the memory of another, as of a version; nil: the newest.
    public func fork(_ agent: String, to name: String, version: Int? = nil) async throws -> Agent {
        let body = ["agent_id": .string(name), "version": version.map(JSON.integer)].compactMapValues { $0 }
        return Agent(json: try await call("POST", [agent, "fork"], body: body))
    }

    /// Makes an old version the newest again, as a new one.
    public func rollback(_ agent: String, to version: Int, expectedVersion: Int? = nil) async throws -> Version {
        let body = ["version": .integer(version), "expected_version": expectedVersion.map(JSON.integer)].compactMapValues { $0 }
        return Version(json: try await call("POST", [agent, "rollback"], body: body))
    }

    /// Forgets an agent; `force`: a pinned one, too.
    public func delete(_ agent: String, force: Bool = false) async throws {
        _ = try await call("DELETE", [agent], ["force": String(force)])
    }

    private func pages(of list: String, _ path: [String], _ query: [String: String] = [:]) async throws -> [JSON] {
        var query = query
        var found: [JSON] = []
        repeat {
            let page = try await call("GET", path, query)
            found += page[list].array
            query["page_token"] = page["next_page_token"].string
        } while query["page_token"] != ""
        return found
    }

    /// One answer. A read is repeated while the service is UNAVAILABLE, and nothing else is.
    private func call(
        _ method: String, _ path: [String], _ query: [String: String] = [:], body: [String: JSON]? = nil
    ) async throws -> JSON {
        let request = try request(method, path, query, body: body)
        let ends = ContinuousClock.now + (limit ?? Self.roundTrip)
        var pause = Self.firstPause
        for _ in 1..<(method == "GET" ? Self.attempts : 1) {
            do {
                return try await answer(request, until: ends)
            } catch let error as KvasirError where error.code == .unavailable {
                try await Task.sleep(for: pause)
                pause *= 2
            }
        }
        return try await answer(request, until: ends)
    }

    private func answer(_ request: URLRequest, until ends: ContinuousClock.Instant) async throws -> JSON {
        var status = 0
        var body = Data()
        for try await piece in connection.send(request, until: ends) {
            switch piece {
            case .status(let found): status = found
            case .data(let data): body.append(data)
            }
        }
        try Task.checkCancellation()
        guard (200..<300).contains(status) else { throw KvasirError(httpStatus: status, body: body) }
        return try readJSON(body)
    }

    private func request(
        _ method: String, _ path: [String], _ query: [String: String] = [:], body: (any Encodable)? = nil
    ) throws -> URLRequest {
        // A URL with the segment "." or ".." means another path.
        if let name = path.first, ["", ".", ".."].contains(name) {
            throw KvasirError(.invalidArgument, "expected a name other than \"\(name)\"", reason: "INVALID_FIELD", field: "agent_id")
        }
        let whole = (["\(base)/v1/agents"] + path.map(Self.escaped)).joined(separator: "/")
        let asked = query.sorted { $0.key < $1.key }.map { "\($0.key)=\(Self.escaped($0.value))" }.joined(separator: "&")
        guard let url = URL(string: asked.isEmpty ? whole : "\(whole)?\(asked)") else { throw Self.wrong("address", base) }
        var request = URLRequest(url: url)
        request.httpMethod = method
        if let token { request.setValue("Bearer \(token)", forHTTPHeaderField: "Authorization") }
        if let body {
            request.httpBody = try JSONEncoder().encode(body)
            request.setValue("application/json", forHTTPHeaderField: "Content-Type")
        }
        return request
    }

    private static func escaped(_ text: String) -> String {
        let plain = CharacterSet(charactersIn: "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~")
        return text.addingPercentEncoding(withAllowedCharacters: plain) ?? ""
    }

    /// Scheme, host and port. Without TLS only this machine is reached: a token would cross the network readable.
    private static func checked(_ address: String) throws -> String {
        let text = address.contains("://") ? address : "http://\(address)"
        guard let found = URLComponents(string: text), let host = found.host, !host.isEmpty,
            found.scheme == "https" || found.scheme == "http", (1...65535).contains(found.port ?? 443),
            address.contains("://") || found.port != nil, ["", "/"].contains(found.path),
            found.query == nil, found.fragment == nil, found.user == nil
        else { throw wrong("address", "expected http://host:port or https://host, got \"\(address)\"") }
        // 127.example.com is a name, and may be anywhere.
        let isHere = ["localhost", "::1", "[::1]"].contains(host) || host.wholeMatch(of: /127(\.[0-9]{1,3}){3}/) != nil
        guard found.scheme == "https" || isHere else { throw wrong("tls", "\(host) is another machine: expected https://") }
        return text.hasSuffix("/") ? String(text.dropLast()) : text
    }

    private static func wrong(_ field: String, _ message: String) -> KvasirError {
        KvasirError(.invalidArgument, message, reason: "INVALID_FIELD", field: field)
    }
}
