"""This machine's memory: the engines' claims, the part for KV, and giving it back when it is short."""
