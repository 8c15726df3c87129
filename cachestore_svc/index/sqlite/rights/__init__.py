"""The right to extend an agent's memory: of the store that owns it, and of the engine with the lease."""
