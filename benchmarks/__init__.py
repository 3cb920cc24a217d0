"""Benchmarks of Vitascope and its peers, in one run on one machine."""
