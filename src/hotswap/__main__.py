"""``python -m hotswap`` is the ``hotswap`` command."""

from hotswap.server.cli import main

main()
