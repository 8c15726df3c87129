// The events of a turn as an asynchronous sequence, read from server-sent events.
import Foundation

/// Each loop sends the turn; a second one is answered from memory, by the turn's request ID. The turn is cancelled when its
/// loop is left, or the task of the loop is cancelled. A loop that ends without an error has had `finished`.
public struct Events: AsyncSequence, Sendable {
    public let requestID: String
    let open: @Sendable () -> Pieces

    public func makeAsyncIterator() -> Iterator {
        Iterator(pieces: open().makeAsyncIterator(), requestID: requestID)
    }

    public struct Iterator: AsyncIteratorProtocol {
        var pieces: Pieces.Iterator
        let requestID: String
        private var status = 0
        private var unread = Data()
        private var isFinished = false

        init(pieces: Pieces.Iterator, requestID: String) {
            self.pieces = pieces
            self.requestID = requestID
        }

        public mutating func next() async throws -> Event? {
            do {
                return try await nextEvent()
            } catch var error as KvasirError {
                if isFinished { return nil }  // the connection broke behind the turn's end
                error.metadata["request_id"] = requestID
                throw error
            }
        }

        private mutating func nextEvent() async throws -> Event? {
            while true {
                while status == 200, let line = nextLine() {
                    if let event = try Self.event(line) {
                        if case .finished = event { isFinished = true }
                        return event
                    }
                }
                switch try await pieces.next() {
                case .status(let status): self.status = status
                case .data(let data): unread.append(data)
                case nil:
                    try Task.checkCancellation()
                    guard status == 200 else { throw KvasirError(httpStatus: status, body: unread) }
                    guard isFinished else { throw KvasirError(.unavailable, "the reply was cut", reason: "STREAM_CUT") }
                    return nil
                }
            }
        }

        private mutating func nextLine() -> Data? {
            guard let end = unread.firstIndex(of: UInt8(ascii: "\n")) else { return nil }
            defer { unread = Data(unread[(end + 1)...]) }
            return unread[..<end]
        }

        /// Nil for the lines between two events.
        private static func event(_ line: Data) throws -> Event? {
            guard line.starts(with: Data("data:".utf8)) else { return nil }
            let json = try readJSON(line.dropFirst(5))
            if case let error = json["error"], error != .null { throw KvasirError(status: error) }
            return Event(json)
        }
    }
}

func readJSON(_ data: Data) throws -> JSON {
    do {
        return try JSONDecoder().decode(JSON.self, from: data)
    } catch {
        throw KvasirError(.internalError, "the answer is no JSON")
    }
}
