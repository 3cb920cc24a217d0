"""Ways to run training steps: as a CUDA graph, and many runs as one batched computation."""
