"""`make fleet`: engines, stores, PostgreSQL, S3 and a balancer as processes of this machine, in one directory."""
