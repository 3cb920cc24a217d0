"""A run folder: recipe, metrics, weights, checkpoints and machine, enough to repeat the run."""
