"""A catalog that lies in a bucket alone: `bucket_catalog` keeps it in memory, and its pages as numbered objects."""
