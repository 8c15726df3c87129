"""Embeddings, one text at a time: by the loaded model, as turns without memory, or by the model beside it."""
