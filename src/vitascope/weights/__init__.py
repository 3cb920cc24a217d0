"""Weights from and to the outside: PyTorch's native layers, timm."""
