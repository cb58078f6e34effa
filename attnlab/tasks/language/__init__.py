"""Language models: training on text, evaluation, generation."""
