"""Data sets: sources, splits, augmentation, mixing, batches."""
