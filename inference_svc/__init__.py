"""The inference service: owns MLX, turns text into tokens, and keeps agents' KV hot."""
