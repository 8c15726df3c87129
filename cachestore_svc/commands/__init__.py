"""The commands of the store's program beside `serve`. `__main__` imports them."""
