"""The asynchronous clients, of which `tools/make_sync_client.py` makes the blocking ones beside this folder."""
