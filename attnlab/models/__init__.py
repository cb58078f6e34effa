"""Models, built from `attnlab.layers`."""
