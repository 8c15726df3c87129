"""Layouts of models: tried before they are used, remembered, and what their KV costs."""
