"""Evaluate a trained model: metrics, calibration, robustness and probes; save or share it with a model card."""
