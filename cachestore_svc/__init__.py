"""The cache store: agents' memories on disk, by name."""
