"""A queue policy and a scheduler for hotswap."""
