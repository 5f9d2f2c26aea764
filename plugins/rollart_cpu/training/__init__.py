"""Training kernels for CPUs."""
