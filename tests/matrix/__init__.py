"""One matrix of tests: every front with every feature, in every world, against dense attention in float64."""
