"""Other libraries' names and argument orders, so that a change of import is all it takes."""
