"""Adding into pixels: segments, marked rows, sums on CPUs."""
