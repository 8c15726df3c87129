// A JSON value: schemas that callers give, and the contract's messages with all fields that have no property here.
import Foundation

public enum JSON: Hashable, Sendable {
    case null
    case bool(Bool)
    case integer(Int)
    case number(Double)
    case string(String)
    case array([JSON])
    case object([String: JSON])

    /// A field; null if there is none, as the contract's JSON leaves out what has its default.
    public subscript(name: String) -> JSON {
        if case .object(let fields) = self { fields[name] ?? .null } else { .null }
    }

    /// A whole number; the contract writes those of 64 bits as strings.
    public var int: Int {
        switch self {
        case .integer(let value): value
        case .string(let text): Int(text) ?? 0
        default: 0
        }
    }

    public var double: Double { if case .number(let value) = self { value } else { Double(int) } }
    public var bool: Bool { self == .bool(true) }
    public var string: String { if case .string(let text) = self { text } else { "" } }
    public var array: [JSON] { if case .array(let values) = self { values } else { [] } }
    public var object: [String: JSON] { if case .object(let fields) = self { fields } else { [:] } }
}

extension JSON: Codable {
    public init(from decoder: any Decoder) throws {
        let value = try decoder.singleValueContainer()
        if value.decodeNil() {
            self = .null
        } else if let bool = try? value.decode(Bool.self) {
            self = .bool(bool)
        } else if let integer = try? value.decode(Int.self) {
            self = .integer(integer)
        } else if let number = try? value.decode(Double.self) {
            self = .number(number)
        } else if let text = try? value.decode(String.self) {
            self = .string(text)
        } else if let values = try? value.decode([JSON].self) {
            self = .array(values)
        } else {
            self = .object(try value.decode([String: JSON].self))
        }
    }

    public func encode(to encoder: any Encoder) throws {
        var value = encoder.singleValueContainer()
        switch self {
        case .null: try value.encodeNil()
        case .bool(let bool): try value.encode(bool)
        case .integer(let integer): try value.encode(integer)
        case .number(let number): try value.encode(number)
        case .string(let text): try value.encode(text)
        case .array(let values): try value.encode(values)
        case .object(let fields): try value.encode(fields)
        }
    }
}

extension JSON: ExpressibleByNilLiteral, ExpressibleByBooleanLiteral, ExpressibleByIntegerLiteral, ExpressibleByFloatLiteral,
    ExpressibleByStringLiteral, ExpressibleByArrayLiteral, ExpressibleByDictionaryLiteral
{
    public init(nilLiteral: ()) { self = .null }
    public init(booleanLiteral value: Bool) { self = .bool(value) }
    public init(integerLiteral value: Int) { self = .integer(value) }
    public init(floatLiteral value: Double) { self = .number(value) }
    public init(stringLiteral value: String) { self = .string(value) }
    public init(arrayLiteral elements: JSON...) { self = .array(elements) }
    public init(dictionaryLiteral elements: (String, JSON)...) { self = .object(Dictionary(elements) { $1 }) }
}
