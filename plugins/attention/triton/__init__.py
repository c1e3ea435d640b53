"""Paged attention kernels in Triton."""
