"""Training objectives. Each file owns its settings, checks, schedules, cost, loss, metrics and validation."""
