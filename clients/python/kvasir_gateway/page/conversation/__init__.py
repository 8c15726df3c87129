"""Talking with agents: the list of conversations, their turns, and their messages."""
