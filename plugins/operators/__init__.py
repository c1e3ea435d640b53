"""Elementwise operators of decoders."""
