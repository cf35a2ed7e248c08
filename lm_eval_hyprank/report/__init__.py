"""From lm-eval's output folders to tables, figures and a page; no model is run."""
