"""One module a subcommand, each with its ``command``."""
