"""Draw figures from numbers, with one style and palette; independent of the models."""
