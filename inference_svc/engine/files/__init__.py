"""KV that leaves the engine as files, and comes back: of memories, of preempted and of held turns."""
