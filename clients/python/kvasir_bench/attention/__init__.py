"""`kvasir bench attention`: attention over pages beside MLX's own and a copy."""
