"""`kvasir up`: its home, its processes, and what supervises them."""
