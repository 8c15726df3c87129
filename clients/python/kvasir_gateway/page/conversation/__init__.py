"""Talking with agents: the list of conversations, their turns, and what was said in them."""
