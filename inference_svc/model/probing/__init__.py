"""Layouts of models: tried before use, remembered, and the bytes of their KV."""
