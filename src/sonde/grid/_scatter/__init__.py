"""Adding samples into pixels: sorted segments, marked rows, blocked sums on CPUs."""
