"""The training loop and its parts (devices, processes, checkpoints, metrics and cost counts), for any task.

The package is also callable: `attnlab.train(config, workdir)` is `attnlab.train.run.train_run`. A function of that name
in `attnlab` would be replaced by this package as soon as one of its modules is imported.
"""

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> dict[str, float]:
        from attnlab.train.run import train_run

        return train_run(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
