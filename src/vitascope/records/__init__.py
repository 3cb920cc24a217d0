"""Runs -> numbers that may be published: records, tables made from them, model cards."""
