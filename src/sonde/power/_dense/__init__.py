"""Products of dense matrices, an engine that several operators share."""
