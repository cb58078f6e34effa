"""The names that the axes of a mesh of devices go by, and what is divided over each."""

ROWS = ('data', 'fsdp', 'expert')
"""Over all of these the rows of a batch are divided."""

HEADS = 'tensor'
"""Over this the heads of attention and the widths of hidden layers are divided."""

TOKENS = 'sequence'
"""Over this the tokens of a row are divided."""
