"""From next-token logits to sentences."""
