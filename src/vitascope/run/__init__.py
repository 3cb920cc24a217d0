"""A run is a directory that can be run again from itself: names, metrics, weights, checkpoints, machine."""
