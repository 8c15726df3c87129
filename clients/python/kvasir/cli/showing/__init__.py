"""How the command line shows things: words of help, text of others, progress."""
