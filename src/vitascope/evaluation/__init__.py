"""Evaluate a trained model: metrics, calibration, robustness, features and probes; save or share it with a model card."""
