"""Speculators: they propose tokens, the verifier in core decides."""
