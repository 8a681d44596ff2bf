"""What the tests share, one file for each job."""
