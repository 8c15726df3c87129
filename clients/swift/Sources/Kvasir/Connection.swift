// HTTP by URLSession: an answer as pieces, while they come. A delegate, because Linux has no `bytes(for:)`.
import Foundation

#if canImport(FoundationNetworking)
    import FoundationNetworking
#endif

enum Piece: Sendable {
    case status(Int)
    case data(Data)
}

typealias Pieces = AsyncThrowingStream<Piece, any Error>

final class Connection: Sendable {
    private let answers = Answers()
    private let session: URLSession

    init() {
        let settings = URLSessionConfiguration.ephemeral
        settings.httpMaximumConnectionsPerHost = 1024  // each stream holds one; six, the default, would queue the others
        settings.timeoutIntervalForRequest = 7 * 86_400  // of silence: a turn may wait for its place. Deadlines are ours
        settings.connectionProxyDictionary = [:]  // a proxy would read the token; Linux heeds only no_proxy
        session = URLSession(configuration: settings, delegate: answers, delegateQueue: nil)
    }

    deinit { session.finishTasksAndInvalidate() }  // a session keeps its delegate until then

    /// Sends a request. Whoever stops reading ends it.
    func send(_ request: URLRequest, until ends: ContinuousClock.Instant?) -> Pieces {
        AsyncThrowingStream { continuation in
            let task = session.dataTask(with: request)
            let timer = ends.map { ends in
                Task {
                    try await Task.sleep(until: ends, clock: .continuous)
                    continuation.finish(throwing: KvasirError.deadline)
                }
            }
            continuation.onTermination = { _ in
                timer?.cancel()
                task.cancel()
            }
            answers.expect(task, continuation)
            task.resume()
        }
    }
}

/// Hands each task's events to its reader.
private final class Answers: NSObject, URLSessionDataDelegate, @unchecked Sendable {
    private let lock = NSLock()
    private var readers: [Int: Pieces.Continuation] = [:]

    func expect(_ task: URLSessionTask, _ reader: Pieces.Continuation) {
        lock.withLock { readers[task.taskIdentifier] = reader }
    }

    func urlSession(
        _: URLSession, dataTask: URLSessionDataTask, didReceive response: URLResponse,
        completionHandler: @escaping @Sendable (URLSession.ResponseDisposition) -> Void
    ) {
        reader(dataTask)?.yield(.status((response as? HTTPURLResponse)?.statusCode ?? 0))
        completionHandler(.allow)
    }

    func urlSession(_: URLSession, dataTask: URLSessionDataTask, didReceive data: Data) {
        reader(dataTask)?.yield(.data(data))
    }

    /// Not followed: the token would go along.
    func urlSession(
        _: URLSession, task _: URLSessionTask, willPerformHTTPRedirection _: HTTPURLResponse, newRequest _: URLRequest,
        completionHandler: @escaping @Sendable (URLRequest?) -> Void
    ) {
        completionHandler(nil)
    }

    func urlSession(_: URLSession, task: URLSessionTask, didCompleteWithError error: (any Error)?) {
        let reader = lock.withLock { readers.removeValue(forKey: task.taskIdentifier) }
        reader?.finish(throwing: error.map { KvasirError(.unavailable, $0.localizedDescription) })
    }

    private func reader(_ task: URLSessionTask) -> Pieces.Continuation? {
        lock.withLock { readers[task.taskIdentifier] }
    }
}
