"""Where kvasir-tiny comes from: the world that it is trained in, its trainer, and what ships of that world."""
