"""Benchmarks: attnlab and the libraries that a user could use instead, timed in the same run."""
