"""Data sets: text, sentence pairs, vocabularies, gold alignments and images.  NumPy and standard library, no JAX."""
