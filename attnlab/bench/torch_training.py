"""PyTorch, which is an optional extra: importing it, copying parameters, and a training step as its users write it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from attnlab.errors import RunError, UserError

GRADIENT_CLIP, LEARNING_RATE = 1.0, 1e-3


def import_torch() -> Any:
    """Return the module torch; raise UserError with the command that installs it if it is missing."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("PyTorch is not installed; pip install 'attnlab[peers]' installs it") from None
    return torch


def load_state_dict(model: Any, arrays: Mapping[str, Any]) -> None:
    """Copy arrays into the parameters of a PyTorch model, by name."""
    model.load_state_dict({name: import_torch().from_numpy(np.array(x)) for name, x in arrays.items()})


def linear_state_dict(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Flax dense layer's parameters with the names and layout of `torch.nn.Linear`."""
    return {f'{name}.weight': params['kernel'].T} | ({f'{name}.bias': params['bias']} if 'bias' in params else {})


def evaluate_loss(model: Any, loss: Callable[..., Any], batch: Sequence[Any]) -> float:
    """Return loss(model, *batch) without dropout."""
    model.eval()
    with import_torch().no_grad():
        value = loss(model, *batch).item()
    model.train()
    return value


def torch_training_step(
    model: Any, loss: Callable[..., Any], batch: Sequence[Any], compiled: bool = False
) -> Callable[[], float]:
    """Return a function that trains `model` by one step on a batch of tensors and returns the loss before the step.

    A step is forward, backward, gradient clipping and fused Adam.

    compiled: run forward and backward through `torch.compile`, which needs a C++ compiler.

    Raises RunError if compilation fails.
    """
    torch = import_torch()
    loss_function = _compile_loss(model, loss, batch) if compiled else loss
    adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> float:
        value = loss_function(model, *batch)
        adam.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        adam.step()
        return value.item()

    return step


def _compile_loss(model: Any, loss: Callable[..., Any], batch: Sequence[Any]) -> Callable[..., Any]:
    compiled_loss = import_torch().compile(loss)
    try:
        compiled_loss(model, *batch).backward()  # compiles both passes; changes nothing except gradients
    except Exception as error:  # tracer, code generator and system compiler have no common exception class
        lines = str(error).strip().splitlines()
        raise RunError(f'torch.compile failed: {lines[0] if lines else type(error).__name__}') from None
    return compiled_loss
