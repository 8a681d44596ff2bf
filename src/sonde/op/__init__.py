"""What an operator is: one registration, one selector, one way to run kernels on each device."""
