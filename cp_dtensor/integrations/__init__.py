"""Context parallelism under the names that other packages and frameworks have for it."""
