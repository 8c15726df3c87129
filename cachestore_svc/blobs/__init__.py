"""Where blobs' bytes lie and how they get there: `backend` is the port, `local_directory` the one implementation, with
`Disk` below it. Knows nothing of agents."""
