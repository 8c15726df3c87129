"""Embeddings: requests of OpenAI's and Ollama's APIs, and their requests to the engine."""
