"""The operator's page at `/`: what lives here, where it lies and what it costs, as HTML that works without scripts."""
