"""Which turns run, which wait, and which bytes each holds: pure policy, without MLX. Imported by `engine` only."""
