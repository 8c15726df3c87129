"""What a request for a turn says, checked and in our own values."""
