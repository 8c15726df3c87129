"""What agents remember, where it is kept, and how it gets to the store (`publishing`) and back (`store`).

`turns` and above import it.
"""
