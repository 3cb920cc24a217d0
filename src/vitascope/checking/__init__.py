"""Is *your* attention right: a reader's code against PyTorch's, and which mistake it has."""
