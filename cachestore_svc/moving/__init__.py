"""Agents on the move: streams in and out, archives, peers."""
