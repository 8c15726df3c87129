"""The texts of a turn: its prompt, from its request and the memory of its agent; and its reply."""
