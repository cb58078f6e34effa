"""Arrays in, arrays out: attention, its implementations and masks.  No Flax here."""
