"""A sequence's KV: how it is stored live, quantized, cut, forked, and turned into tensor files and back.

`engine`, `model`, `bench`, `config` and `describe` import it; it imports no other room.
"""
