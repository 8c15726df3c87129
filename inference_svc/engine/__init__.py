"""The engine: runs turns in batches on the MLX thread. Others import `engine.Engine` and the plain data of `api`."""
