"""What stands in the place of mlx-lm's own computing: rows that do not depend on their batch, attention over pages."""
