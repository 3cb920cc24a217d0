"""Recipes: the schema of all settings, and reading and writing them as YAML."""
