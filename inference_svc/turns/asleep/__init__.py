"""Agents of which only the tokens are kept: put to sleep by hand or because nobody uses them, and woken by a turn."""
