"""Search models: rank the candidates of a query by the probability of a click."""
