"""The catalog's verbs for namespaces whose names, texts and hashes are sealed in the tables."""
