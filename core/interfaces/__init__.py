"""The contracts: one file a kind of component, and what all components have in common."""
