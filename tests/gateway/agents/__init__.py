"""Agent clients of others, unmodified: their tasks, what they send, and the engine whose replies a script decides."""
