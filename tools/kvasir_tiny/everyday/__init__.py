"""Everyday talk: facts, names and small talk as people type them, beside the small world's own English."""
