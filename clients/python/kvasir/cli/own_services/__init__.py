"""Services that a command starts for itself and ends: without a supervisor, in a home of their own."""
