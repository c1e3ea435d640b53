"""Executors: how the workers of one engine are run."""
