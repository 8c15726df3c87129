"""Values that chat templates read, and those of them that stay as a memory has them."""
