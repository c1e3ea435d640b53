"""Kernels of our own for CPUs, compiled on the user's machine by numba, and run on torch's threads."""
