"""Measurement of the time that a killed pool needs until it answers again."""
