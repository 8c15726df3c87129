"""What both services are served with: listening, credentials, fair shares of what callers share."""
