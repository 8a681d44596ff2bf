"""Products of dense matrices, for the operators that are made of them."""
