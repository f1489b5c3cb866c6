"""Measurements: one script a study, and what they share."""
