"""What agents remember, where it is kept, and how it becomes a version in the store (`lines`, `publishing`)
and comes back (`store`).

`turns` and above import it.
"""
