"""Constrained replies: formats are tried, compiled, cached, and followed token by token. No MLX."""
