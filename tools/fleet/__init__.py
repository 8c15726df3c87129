"""`make fleet`: engines, a store, PostgreSQL, S3 and a balancer as processes of this machine, in one directory."""
