"""Constrained replies: formats are tried, compiled, cached, and followed token by token. No MLX.

`engine`, `model`, `edge` and `__main__` import it; it imports no other room.
"""
