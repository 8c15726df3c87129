"""The verbs of the port `catalog.py`, by noun: a View to read, a Change to write as well."""
