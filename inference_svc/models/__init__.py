"""Models that come with Kvasir."""
