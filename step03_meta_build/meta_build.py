"""Step 3: build a model that has every shape and no memory.

You learn the meta device, and the context that puts a constructor's parameters on it.
Prints that the meta model is the real one without its bytes, what a 259 GB model costs to build that way, and
why it cannot be moved anywhere. Nothing is written.
"""

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path

try:
    from step01_model_def.model_def import (
        CONFIGS, TinyTransformerClassifier, count_meta_parameters, count_parameters, format_bytes, run_script,
    )  # fmt: skip
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

import psutil
import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from step02_checkpoint.build_checkpoint import build_model

MODULE = "step03_meta_build.meta_build"  # for the fresh processes in which memory is measured

# --- the context ------------------------------------------------------------------------------------------


# What is built now goes to `device`; `moved` knows the result for each tensor that was registered.
Context = namedtuple("Context", "device include_buffers moved")
innermost = ContextVar("innermost", default=None)  # the context that a thread is in; each thread has its own


def on_register(module: nn.Module, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Move a tensor that a module registers, if this thread is in a context that wants it; else return None."""
    context = innermost.get()
    if context is None or tensor is None or isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return None  # the last is a lazy module's: it has no shape yet, and so nothing to move
    if not isinstance(tensor, nn.Parameter) and not context.include_buffers:
        return None
    if tensor not in context.moved:  # registered under a second name, it is the same tensor again: the tie holds
        new = tensor if tensor.device == context.device else dress(tensor.detach().to(context.device), tensor)
        context.moved[tensor] = new
    return context.moved[tensor]


# Registered once and for all: adding hooks while another thread builds a module would disturb it.
register_module_parameter_registration_hook(on_register)
register_module_buffer_registration_hook(on_register)


@contextmanager
def entered(context: Context | None):
    """Make a context the one that this thread builds in; None suspends the others."""
    outer = innermost.set(context)
    try:
        yield
    finally:
        innermost.reset(outer)


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool = False):
    """Build modules whose parameters are on `device` from the moment they are registered.

    Parameters keep their class, attributes, `requires_grad` and ties to each other (one that was built before
    the context stays where it is, and its tie is lost). Acts only in the thread that entered it; may be
    nested, the innermost decides. On the meta device, a constructor that moves itself (`self.to("cpu")`)
    leaves its parameters on meta.

    Accelerate's context of this name replaces `nn.Module.register_parameter`, for all threads. Here PyTorch's
    own hook inside `register_parameter` is used: two contexts cannot restore each other's replacement.
    """
    device = torch.device(device)
    stay = StayOnMeta() if device.type == "meta" else nullcontext()
    with stay, entered(Context(device, include_buffers, WeakTensorKeyDictionary())):
        yield


def init_empty_weights(include_buffers: bool = False):
    """Build modules whose parameters, and with `include_buffers` also buffers, are on the meta device.

    Buffers stay real by default: one that is computed in the constructor and not saved (`persistent=False`)
    is in no checkpoint, and would never get its values back. The idea is Accelerate's, and the name.
    """
    return init_on_device("meta", include_buffers=include_buffers)


def dress(new: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Give a new tensor the class, the attributes and the `requires_grad` of the one whose place it takes."""
    new = new.detach()
    if all(type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ for tensor in (new, like)):
        new = torch.Tensor._make_subclass(type(like), new)  # `as_subclass` makes a view, whose slices need no gradient
        new.__dict__.update(like.__dict__)
    elif isinstance(like, nn.Parameter):  # tensors that compute in a way of their own keep their class
        new = nn.Parameter(new)
    return new.requires_grad_(like.requires_grad)


class StayOnMeta(TorchFunctionMode):
    """While active, moving a meta tensor to another device leaves it on meta (its dtype does change).

    Nor is one filled with normal numbers: it has no room for them, and PyTorch would load its compiler to find out.
    """

    MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)
    FILLS = (torch.Tensor.normal_, nn.init.normal_)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.FILLS and (tensor := kwargs.get("tensor", *args[:1])).is_meta:
            return tensor
        if func in self.MOVES and args[0].is_meta:
            given = (*args[1:], *kwargs.values())
            dtypes = [getattr(value, "dtype", value) for value in given]  # a dtype, or a tensor that has it
            return args[0].to(next((dtype for dtype in dtypes if isinstance(dtype, torch.dtype)), args[0].dtype))
        return func(*args, **kwargs)


# --- measuring --------------------------------------------------------------------------------------------


def rss_mb() -> float:
    """Measure the memory that this process has in RAM now (its resident set size), in MiB."""
    return psutil.Process().memory_info().rss / 2**20


def peak_rss_mb(statement: str, setup: str = "pass") -> float:
    """Measure how far a statement raises the memory of a fresh process at its highest point, in MiB.

    As with `timeit`, the code comes as text, since it runs in another process: here, what was allocated
    before would hide the peak. `setup` (the imports) is not counted. Raises RuntimeError with the other
    process's own error when it fails.
    """
    return measure_rss(statement, setup)["peak_mb"]


def measure_rss(statement: str, setup: str = "pass") -> dict:
    """Run a statement in a fresh process; returns how its memory grew, in MiB above what `setup` had taken.

    `peak_mb`: the highest point. `curve`: pairs of seconds and MiB. `anonymous_mb` and `file_mb`: what it had
    at the end, apart; pages of a mapped file can be taken back by the system at any time, so a peak made of
    them needs no RAM of that size (`file_mb` is 0 where the system does not tell them apart).
    """
    code = f"import sys; from {MODULE} import measure_here; measure_here(*sys.argv[1:])"
    child = subprocess.run([sys.executable, "-c", code, statement, setup], capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"the measured process failed:\n{child.stderr.strip()}")
    return json.loads(child.stdout.splitlines()[-1])


def measure_here(statement: str, setup: str) -> None:
    """Be the process that `measure_rss` starts: run the code and print what it took as one line of JSON."""
    namespace, process, curve, done = {}, psutil.Process(), [], threading.Event()
    exec(setup, namespace)
    before, earlier_peak, start = process.memory_info(), peak_rss_bytes(), time.perf_counter()

    def keep_sampling():
        finished = False
        while not finished:
            finished = done.wait(0.005)
            curve.append((time.perf_counter() - start, (process.memory_info().rss - before.rss) / 2**20))

    sampler = threading.Thread(target=keep_sampling, daemon=True)  # it ends with the process if the statement fails
    sampler.start()
    exec(statement, namespace)  # what it makes stays alive in the namespace until the end is measured
    done.set()
    sampler.join()
    after, peak = process.memory_info(), peak_rss_bytes()
    highest = (peak if peak > earlier_peak else after.rss) - before.rss
    in_files = getattr(after, "shared", 0) - getattr(before, "shared", 0)
    growth = {"peak_mb": highest, "file_mb": in_files, "anonymous_mb": after.rss - before.rss - in_files}
    print(json.dumps({**{name: size / 2**20 for name, size in growth.items()}, "curve": curve}))


def peak_rss_bytes() -> int:
    """Read the highest RSS that this process ever had.

    Not `resource.getrusage` on Linux: its `ru_maxrss` starts at the peak of the process that started this
    one, so a child of a large notebook seems large itself.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text()).group(1))
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- the lesson -------------------------------------------------------------------------------------------


def structure(model: nn.Module) -> dict:
    """Describe a model without its values: tensor name -> (shape, dtype)."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}


def build_empty(config_name: str) -> TinyTransformerClassifier:
    """Build the model of a configuration on the meta device, in eval mode: all shapes, no memory."""
    with init_empty_weights():
        return TinyTransformerClassifier(**CONFIGS[config_name]).eval()


def warm_up() -> None:
    """Have PyTorch import what its first meta module needs, so that no model is blamed for it."""
    build_empty("tiny")


def error_of(function, *args) -> str:
    """Call a function that must fail, and return what its error says."""
    try:
        function(*args)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    raise RuntimeError("it should have failed, and did not")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="giant", choices=CONFIGS, help="the model to build on meta")
    args = parser.parse_args()

    square = torch.empty(100_000, 100_000, device="meta")  # (100000, 100000)
    print(f"meta_tensor_shape={list(square.shape)}")
    print(f"meta_tensor_bytes_if_real={square.nbytes} ({format_bytes(square.nbytes)})")

    random_state = torch.get_rng_state()
    with torch.device("meta"):
        model = TinyTransformerClassifier(**CONFIGS["tiny"])
    print(f"parameters={count_parameters(model)}")
    print(f"meta_parameter_tensors={count_meta_parameters(model)}")
    print(f"same_structure_as_the_real_model={structure(model) == structure(build_model('tiny'))}")
    print(f"random_numbers_drawn={not torch.equal(random_state, torch.get_rng_state())}")
    print(f"to_cpu_error={error_of(build_empty('tiny').to, 'cpu')}")

    warm_up()
    before, start = rss_mb(), time.perf_counter()
    large = build_empty(args.config)
    seconds, grown = time.perf_counter() - start, rss_mb() - before
    size = sum(parameter.nbytes for parameter in large.parameters())
    print(f"{args.config}_parameters={count_parameters(large)}")
    print(f"{args.config}_bytes_if_real={size} ({format_bytes(size)})")
    print(f"{args.config}_meta_build_seconds={seconds:.2f}")
    print(f"{args.config}_meta_build_rss_mb={grown:.1f}")
    peak = peak_rss_mb(f"build_empty({args.config!r})", f"from {MODULE} import *; warm_up()")
    print(f"{args.config}_meta_build_peak_rss_mb={peak:.1f}")


if __name__ == "__main__":
    run_script(main)
