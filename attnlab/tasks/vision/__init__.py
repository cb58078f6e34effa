"""Image classification by Vision Transformers and residual networks."""
