"""Residual memory (ZeRO-R): activation checkpoints whose inputs are split over ranks, or rest on the host or on disk."""
