"""Blobs in a bucket of S3: `bucket_blobs` implements the port over `bucket`, with `disk_tier` before it."""
