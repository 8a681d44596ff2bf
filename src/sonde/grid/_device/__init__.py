"""Device code that every Triton kernel of the family may use: taps, axes, layouts, compensated sums, fixed point."""
