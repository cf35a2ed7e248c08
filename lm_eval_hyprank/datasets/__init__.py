"""The data sets that the tasks rank: loading, checking, prompts."""
