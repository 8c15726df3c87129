"""Constrained replies: formats are tried, compiled, cached, and followed token by token. No MLX.

`engine`, `model` and `edge` import it; it imports no other room.
"""
