"""The clients of both services, blocking and asynchronous."""
