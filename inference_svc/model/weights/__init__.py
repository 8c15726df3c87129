"""Weights of a model as MLX arrays over the mapped pages of their files, and the means for that."""
