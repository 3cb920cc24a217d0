"""Where images come from: sources, splits, augmentation, mixing, batches."""
