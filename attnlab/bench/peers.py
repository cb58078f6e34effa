"""The way to PyTorch, an optional extra."""

from typing import Any

from attnlab.errors import UserError


def torch() -> Any:
    """The module; UserError, with what installs it, where it is missing."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("PyTorch is not installed; pip install 'attnlab[peers]' installs it") from None
    return torch
