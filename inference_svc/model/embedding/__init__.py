"""Embeddings: vectors of the length 1 from a model's last hidden rows, by the loaded model or by one beside it."""
