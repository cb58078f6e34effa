"""Names of attention implementations."""

CHOICES = ('auto', 'dense', 'blockwise', 'cudnn', 'splash', 'xla')
"""Values of the config field `implementation`."""
