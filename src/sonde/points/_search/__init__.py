"""The point search shared by all operators of the family."""
