"""Open trained models and predict with them; training and everything above build on it."""
