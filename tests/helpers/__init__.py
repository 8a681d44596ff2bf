"""Code shared by the tests, one file for each job."""
