"""Encryption at rest, per namespace: its key and who opens it, and the sealed form of files and names. No SQL."""
