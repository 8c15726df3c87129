"""`kvasir bench store`: the store beside this machine's wire, disk and hash."""
