"""What chat templates read, and what of it stays as a memory has it."""
