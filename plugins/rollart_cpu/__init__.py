"""Inference and training kernels for CPUs."""
