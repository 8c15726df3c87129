"""The Kvasir SDK: what a client, the engine and the store share. It needs neither MLX nor SQL."""

__version__ = "0.1.0"
