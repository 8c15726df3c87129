"""Replies as text: their parts, their way back into messages, and the budget of their reasoning."""
