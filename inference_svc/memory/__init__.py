"""What agents remember, where it is kept, and how it gets to the store and back. `turns` and above import it."""
