"""What model components share: layers with logical axes, the mesh, rotary embeddings, checkpoints, tokenizers."""
