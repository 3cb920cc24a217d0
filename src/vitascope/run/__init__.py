"""A run is a directory; here is what it knows of the machine it ran on."""
