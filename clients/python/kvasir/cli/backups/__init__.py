"""`kvasir backup` and `kvasir restore`: a home's files in a folder, each by the digest of its bytes."""
