"""Checkpoints: what is read from and written to files."""
