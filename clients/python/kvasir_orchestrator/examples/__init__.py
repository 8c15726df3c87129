"""Programs that use scenarios and agents' memories from Python."""
