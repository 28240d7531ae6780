"""Step 3: build a model that has every shape and no memory.

You learn the meta device, and the context that puts a constructor's parameters on it.
Prints that the meta model is the real one without its bytes, what a 259 GB model costs to build that way, and
why it cannot be moved anywhere. Nothing is written.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import psutil
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from step01_model_def.model_def import (
    CONFIGS,
    TinyTransformerClassifier,
    count_meta_parameters,
    count_parameters,
    format_bytes,
    run_script,
)
from step02_checkpoint.build_checkpoint import build_model

# --- the context ------------------------------------------------------------------------------------------

_open_contexts = threading.local()  # .stack: the contexts that this thread is in, the innermost last


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool = False):
    """Build modules whose parameters are on `device` from the moment they are registered.

    Parameters keep their class, attributes, `requires_grad` and ties. Acts only in the thread that entered
    it; may be nested, the innermost decides. On the meta device, a constructor that moves itself
    (`self.to("cpu")`) leaves its parameters on meta.

    Accelerate's context of this name replaces `nn.Module.register_parameter`, for all threads. Here PyTorch's
    own hook inside `register_parameter` is used: two contexts cannot restore each other's replacement.
    """
    device = torch.device(device)
    moved = WeakTensorKeyDictionary()  # a tensor registered under two names is moved once: the tie holds
    me = object()
    stack = _open_contexts.__dict__.setdefault("stack", [])

    def on_register(module, name, tensor):
        if stack_of_this_thread()[-1:] != [me] or tensor is None or is_lazy(tensor):
            return None
        if tensor not in moved:
            moved[tensor] = move_keeping_class(tensor, device)
            moved[moved[tensor]] = moved[tensor]
        return moved[tensor]

    with ExitStack() as cleanup:
        cleanup.callback(register_module_parameter_registration_hook(on_register).remove)
        if include_buffers:
            cleanup.callback(register_module_buffer_registration_hook(on_register).remove)
        if device.type == "meta":
            cleanup.enter_context(StayOnMeta())
        stack.append(me)
        cleanup.callback(stack.remove, me)
        yield


def init_empty_weights(include_buffers: bool = False):
    """Build modules whose parameters, and with `include_buffers` also buffers, are on the meta device.

    Buffers stay real by default: one that is computed in the constructor and not saved (`persistent=False`)
    is in no checkpoint, and would never get its values back. The idea is Accelerate's, and the name.
    """
    return init_on_device("meta", include_buffers=include_buffers)


def stack_of_this_thread() -> list:
    """List the contexts that the current thread has entered and not left."""
    return _open_contexts.__dict__.get("stack", [])


def is_lazy(tensor: torch.Tensor) -> bool:
    """Tell whether this is a parameter of a lazy module, which has no shape yet and so nothing to move."""
    return isinstance(tensor, nn.parameter.UninitializedTensorMixin)


def move_keeping_class(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a parameter or a buffer; class, attributes and `requires_grad` stay."""
    if tensor.device == device:
        return tensor
    new = tensor.detach().to(device).as_subclass(type(tensor))
    new.__dict__.update(tensor.__dict__)
    return new.requires_grad_(tensor.requires_grad)


class StayOnMeta(TorchFunctionMode):
    """While active, moving a meta tensor to another device leaves it on meta (its dtype does change)."""

    MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.MOVES and args[0].is_meta:
            dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
            return args[0].to(dtypes[0]) if dtypes else args[0]
        return func(*args, **kwargs)


# --- measuring --------------------------------------------------------------------------------------------


def rss_mb() -> float:
    """Measure the memory that this process has in RAM now (its resident set size), in MiB."""
    return psutil.Process().memory_info().rss / 2**20


def peak_rss_mb(statement: str, setup: str = "pass") -> float:
    """Measure how far a statement raises the memory of a fresh process, in MiB, at its highest point.

    As with `timeit`, code comes as text, since it runs in another process: what this one has already
    allocated would hide the peak. `setup` (the imports) is not counted.
    Raises RuntimeError with the child's own error when it fails.
    """
    return measure_rss(statement, setup)["peak_mb"]


def measure_rss(statement: str, setup: str = "pass") -> dict:
    """Run a statement in a fresh process and return how its memory grew, in MiB.

    `peak_mb`: the highest point. `anonymous_mb` and `file_mb`: what it had at the end; file-backed memory is
    pages of a mapped file, which the system may take back at any time (0 where the system does not say).
    `seconds`, `mb`: the curve over time.
    """
    module = "step03_meta_build.meta_build"
    code = f"import json\nfrom {module} import RssMeter\n{setup}\nwith RssMeter() as meter:\n    "
    code += statement.replace("\n", "\n    ") + "\nprint(json.dumps(meter.result()))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"the measured process failed:\n{child.stderr.strip()}")
    return json.loads(child.stdout.splitlines()[-1])
