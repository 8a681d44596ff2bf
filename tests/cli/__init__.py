"""Tests of the commands; a package, so that pytest does not confuse its conftest.py with the one in tests/."""
