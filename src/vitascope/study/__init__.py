"""Studies: train every combination of settings with several seeds and compare the results."""
