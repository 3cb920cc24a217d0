"""Evaluate a trained model and predict the classes of new images."""
