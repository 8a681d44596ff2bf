"""Tests of the commands; a package, so that its conftest.py is not taken for the one above."""
