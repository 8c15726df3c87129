"""Who runs, who waits and who has which bytes: pure policy, without MLX. Imported by `engine` only."""
