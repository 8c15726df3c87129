"""Computations that replace mlx-lm's own: rows that do not depend on their batch, attention over pages."""
