"""A sequence's KV: how it is stored live, quantized, cut, forked, and turned into tensor files and back."""
