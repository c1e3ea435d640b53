"""KV transfers: pages to and from somewhere else."""
