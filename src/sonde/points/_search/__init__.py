"""The search among points that all operators of the family share."""
