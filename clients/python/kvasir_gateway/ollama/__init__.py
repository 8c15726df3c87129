"""Ollama's API: chat, generate, and its lists of models."""
