"""Who computes embeddings, one text at a time: the loaded model, as turns without memory, or the model beside it."""
