"""KV managers, and the eviction policies of those that reuse pages."""
