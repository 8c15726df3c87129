"""The commands about who may call, and who did what."""
