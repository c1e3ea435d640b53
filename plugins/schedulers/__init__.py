"""Schedulers, and the queue policies that order their requests."""
