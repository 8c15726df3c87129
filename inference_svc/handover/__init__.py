"""Turns that move to another engine while they decode: given away, taken in, and read on with a resume token."""
