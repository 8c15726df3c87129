"""How both services are served: addresses, credentials, limits, and fair shares of everything that callers share."""
