"""Read data sets from folders, array files, or by name."""
