"""Decision logs, read after the fact: what happened to a request, where time went, and whether it can be done again."""
