"""Training objectives: classification, DINO, MAE. Each file owns its loss, metrics and validation."""
