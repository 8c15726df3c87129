"""A turn's prompt, from its request and what its agent remembers; and the text of its reply."""
