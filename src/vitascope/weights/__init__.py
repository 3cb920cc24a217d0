"""Pretrained weights: read, adapt and write them in the formats of timm, transformers and PyTorch."""
