"""The prompted judge: a model is shown the candidates and asked which are best."""
