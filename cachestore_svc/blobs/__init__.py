"""Blobs as files: how they are written, verified, read and removed. Knows nothing of agents."""
