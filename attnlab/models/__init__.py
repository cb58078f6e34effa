"""Whole models, built of `attnlab.layers`."""
