"""A sequence's KV: how it is stored live, quantized, cut, forked, and turned into tensor files and back.

`engine` and `model` import it; it imports no other room.
"""
