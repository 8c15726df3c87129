"""Encryption at rest, per namespace: its key and the master keys that open it, and the sealed form of files and names.
No SQL."""
