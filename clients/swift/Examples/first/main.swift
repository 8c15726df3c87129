// The first example of README.md: an agent is told something, and remembers it.
import Foundation
import Kvasir

let environment = ProcessInfo.processInfo.environment
let token = try String(contentsOfFile: "\(environment["HOME"]!)/.kvasir/tokens/client.token", encoding: .utf8)
let gateway = try Client(environment["KVASIR_URL"] ?? "http://127.0.0.1:8642", token: token)  // where `kvasir up` listens
let turn = Turn(append: [.user("My name is Anna. What is my name?")])
for try await event in try gateway.generate(agent: "ada", turn) {
    if case .delta(let delta) = event { print(delta.text, terminator: "") }
}
print()
