"""Text, sentence pairs, vocabularies and gold alignments: NumPy and the standard library, no JAX."""
