"""Models of random weights with the configuration of a real one, for measurements where no model can be fetched."""
