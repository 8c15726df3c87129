"""The verbs of the port `catalog.py`, by what they are about: what an operation may read of it, and write."""
