"""Constrained replies: formats are tried, compiled, kept, and advanced a token at a time. No MLX."""
