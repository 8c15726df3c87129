"""Tokens that a step tries ahead: where they come from, and how many pay."""
