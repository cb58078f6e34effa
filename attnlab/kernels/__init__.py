"""Pure functions of arrays: attention and its implementations, masks, positions, mixture of experts.  No Flax."""
