"""The way to PyTorch, an optional extra, and a training step as its users write one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attnlab.errors import RunError, UserError

GRADIENT_CLIP, LEARNING_RATE = 1.0, 1e-3


def import_torch() -> Any:
    """The module; UserError, with what installs it, where it is missing."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("PyTorch is not installed; pip install 'attnlab[peers]' installs it") from None
    return torch


def load_state_dict(model: Any, arrays: Mapping[str, Any]) -> None:
    """Give a model the parameters of its names."""
    model.load_state_dict({name: import_torch().from_numpy(np.array(x)) for name, x in arrays.items()})


def linear_state_dict(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Our dense layer under PyTorch's names and in its layout."""
    return {f'{name}.weight': params['kernel'].T} | ({f'{name}.bias': params['bias']} if 'bias' in params else {})


def evaluate_loss(model: Any, loss: Callable[..., Any], batch: Sequence[Any]) -> float:
    """loss(model, *batch) without dropout."""
    model.eval()
    with import_torch().no_grad():
        value = loss(model, *batch).item()
    model.train()
    return value


def torch_training_step(
    model: Any, loss: Callable[..., Any], batch: Sequence[Any], compiled: bool = False
) -> Callable[[], float]:
    """A function that trains `model` by one step of clipping and fused Adam on a batch of tensors, and returns
    loss(model, *batch) before it.

    compiled: forward and backward by `torch.compile`, which needs a C++ compiler; raises RunError where it fails.
    """
    framework = import_torch()
    graded = _compile(model, loss, batch) if compiled else loss
    adam = framework.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        value = graded(model, *batch)
        adam.zero_grad()
        value.backward()
        framework.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        adam.step()
        return value.item()

    return step


def _compile(model: Any, loss: Callable[..., Any], batch: Sequence[Any]) -> Callable[..., Any]:
    graded = import_torch().compile(loss)
    try:
        graded(model, *batch).backward()  # compiles; gradients are all that it changes
    except Exception as error:  # of the tracer, of the code generator, of the system's compiler: no common class
        lines = str(error).strip().splitlines()
        raise RunError(f'torch.compile failed: {lines[0] if lines else type(error).__name__}') from None
    return graded
