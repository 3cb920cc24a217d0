"""Coursework: exercises, the checker that names mistakes, and the five sheets."""
