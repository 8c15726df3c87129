"""The HTTP gateway: OpenAI's and Anthropic's APIs and Kvasir's own before an engine; a gRPC client like any other."""
