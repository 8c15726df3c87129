"""`kvasir bench memory-path`: what an agent's memory costs on its way to the store and back, by agents over gRPC."""
