"""`kvasir up`: its home, its processes, and their supervisor."""
