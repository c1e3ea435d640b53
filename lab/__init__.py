"""Experiments on engines. Reaches parts through the registry."""
