"""Check a user's transformer code against PyTorch's layers and name its mistakes."""
