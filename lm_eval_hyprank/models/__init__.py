"""Models of this package for lm-eval."""
