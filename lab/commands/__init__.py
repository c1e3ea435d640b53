"""One module a subcommand, each with its ``command``, as in ``hotswap.server.commands``."""
