"""Encryption at rest, per namespace: its key, the master keys that open it, the sealed form of files and names."""
