"""What a caller passes before its request is translated: its connection, site and key, its place, and its body."""
