"""Training: objectives, optimizers, schedule, weight averaging, validation and the training loop."""
