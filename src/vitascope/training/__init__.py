"""Learning: objective, optimizers, schedule, averaging, evaluation, and the loop that yields small records."""
