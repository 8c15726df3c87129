// swift-tools-version:6.0
// The package: the library Kvasir without dependencies, its first example, and its program of tests/conformance.
import PackageDescription

let package = Package(
    name: "kvasir",
    platforms: [.macOS(.v13), .iOS(.v16)],
    products: [.library(name: "Kvasir", targets: ["Kvasir"])],
    targets: [
        .target(name: "Kvasir"),
        .executableTarget(name: "conformance", dependencies: ["Kvasir"]),
        .executableTarget(name: "first", dependencies: ["Kvasir"], path: "Examples/first"),
    ]
)
