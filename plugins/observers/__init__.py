"""Observers: they watch an engine and change nothing."""
