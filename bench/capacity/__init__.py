"""Measurements of what a full table does."""
