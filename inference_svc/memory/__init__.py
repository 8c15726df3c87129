"""What agents remember, how it becomes versions in the store (`lines`, `publishing`), and comes back (`store`)."""
