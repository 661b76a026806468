"""Figures of the training loop."""
