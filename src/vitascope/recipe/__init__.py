"""What to build and train, as words: the schema, and YAML in and out."""
