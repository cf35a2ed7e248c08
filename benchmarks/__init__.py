"""Measurements against stock lm-eval; ratios only, nothing is asserted."""
