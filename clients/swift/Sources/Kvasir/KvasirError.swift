// The one error of this client: a refusal by a service, by the network, or by the client itself.
import Foundation

/// Only UNAVAILABLE and RESOURCE_EXHAUSTED are worth a retry unchanged, after `retryAfter`.
public struct KvasirError: Error, Sendable, CustomStringConvertible {
    /// gRPC's codes, in the order of their numbers.
    public enum Code: String, CaseIterable, Sendable {
        case ok = "OK", cancelled = "CANCELLED", unknown = "UNKNOWN", invalidArgument = "INVALID_ARGUMENT"
        case deadlineExceeded = "DEADLINE_EXCEEDED", notFound = "NOT_FOUND", alreadyExists = "ALREADY_EXISTS"
        case permissionDenied = "PERMISSION_DENIED", resourceExhausted = "RESOURCE_EXHAUSTED"
        case failedPrecondition = "FAILED_PRECONDITION", aborted = "ABORTED", outOfRange = "OUT_OF_RANGE"
        case unimplemented = "UNIMPLEMENTED", internalError = "INTERNAL", unavailable = "UNAVAILABLE"
        case dataLoss = "DATA_LOSS", unauthenticated = "UNAUTHENTICATED"
    }

    public let code: Code
    /// An `ErrorReason` of the contract, `HEAD_MOVED`; the code's name if none was sent.
    public private(set) var reason: String
    /// For people.
    public let message: String
    /// The field that is wrong; empty if none was named.
    public private(set) var field: String
    /// Seconds; nil where waiting does not help.
    public private(set) var retryAfter: TimeInterval?
    /// The facts of the reason, by the names of the contract. A broken turn has its `request_id`: a retry takes it.
    public internal(set) var metadata: [String: String] = [:]

    public var description: String { "\(code.rawValue) (\(reason)): \(message)" }

    init(_ code: Code, _ message: String, reason: String? = nil, field: String = "") {
        self.code = code
        self.reason = reason ?? code.rawValue
        self.message = field.isEmpty ? message : "\(field): \(message)"
        self.field = field
    }

    /// A google.rpc.Status, as the gateway sends it.
    init(status: JSON) {
        let number = status["code"].int
        self.init(Code.allCases.indices.contains(number) ? Code.allCases[number] : .unknown, status["message"].string)
        for detail in status["details"].array {
            switch detail["@type"].string.split(separator: ".").last {
            case "ErrorInfo":
                reason = detail["reason"].string
                metadata = detail["metadata"].object.mapValues(\.string)
                field = metadata.removeValue(forKey: "field") ?? field
            case "BadRequest":
                field = detail["fieldViolations"].array.first?["field"].string ?? field
            case "RetryInfo":
                retryAfter = TimeInterval(detail["retryDelay"].string.dropLast())  // "1.500s"
            default: break
            }
        }
    }

    /// An answer's body, or that of a proxy, which holds no status.
    init(httpStatus: Int, body: Data) {
        let error = (try? JSONDecoder().decode(JSON.self, from: body))?["error"] ?? .null
        guard error["code"].int == 0 else {
            self.init(status: error)
            return
        }
        let codes: [Int: Code] = [
            401: .unauthenticated, 403: .permissionDenied, 404: .notFound, 429: .resourceExhausted,
            502: .unavailable, 503: .unavailable, 504: .unavailable,
        ]
        self.init(codes[httpStatus] ?? .unknown, "HTTP status \(httpStatus) without a status of Kvasir")
    }

    static let deadline = KvasirError(.deadlineExceeded, "the client's deadline is over")
}
