"""Figures: small functions that draw on a matplotlib Axes. Needs matplotlib, so nothing is imported here."""
