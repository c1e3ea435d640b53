"""Forms in which linear layers keep their weights."""
