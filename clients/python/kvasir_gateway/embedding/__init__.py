"""Embeddings: what OpenAI's and Ollama's APIs ask for, and how the engine is asked."""
