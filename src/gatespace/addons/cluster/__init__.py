"""Studies on a Ray cluster, and results through a URL."""
