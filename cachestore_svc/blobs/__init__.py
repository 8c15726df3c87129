"""Where blobs' bytes lie and how they get there: `backend` is the port; `local_directory` and `bucket` implement it."""
