"""A pretend accelerator for a machine that has none: two devices, real numbers, and a log of every transfer.

After `install()`, `gpu:0` and `gpu:1` are devices of PyTorch. Their tensors compute on the CPU, refuse to meet a
tensor of another device, and each copy between devices is noted in `LOG` with its bytes. So a laptop shows what
moves in a machine with two GPUs, and what would fail there.

A real accelerator does things later than it is told. So does this one within `with late("copies", "computes"):`:
what is late waits in its stream until somebody must have it, by an event that is waited for, or because numbers leave
the device. Whoever forgets to wait gets wrong numbers, each time.

It rests on a private interface of torch 2.13, works once per process, and needs `no_grad` or `inference_mode`: the
lessons on hooks and on a language model use it, and tests do in processes of their own.
"""

from collections import deque
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gpu"
aten = torch.ops.aten


class Transfer(NamedTuple):
    """One copy from a device to another."""

    source: str
    target: str
    bytes: int


LOG: list[Transfer] = []
PINNED: list[torch.Tensor] = []


class Stream:
    """What an accelerator was told, in order. It does it at once, or, `late`, when somebody must have it."""

    late: set[str] = set()
    every: WeakSet = WeakSet()

    def __init__(self, device=None, kind="copies"):
        self.kind, self.waiting = kind, deque()
        Stream.every.add(self)

    def tell(self, work) -> None:
        """Have something done after all that was told before."""
        self.waiting.append(work)
        if self.kind not in Stream.late:
            self.catch_up()

    def catch_up(self, until: "Moment | None" = None) -> None:
        """Do what waits: all of it, or what is before a moment."""
        with torch.inference_mode():  # in which anything may be written to
            while self.waiting and not (until and until.reached):
                self.waiting.popleft()()

    def wait_event(self, event: "Event") -> None:
        """Do what is told from now on after an event, as it was recorded last."""
        self.tell(event.moment.wait)


class Moment:
    """A moment in a stream's work."""

    def __init__(self, stream: Stream | None = None):
        self.stream, self.reached = stream, stream is None

    def reach(self) -> None:
        self.reached = True

    def wait(self) -> None:
        if not self.reached:
            self.stream.catch_up(until=self)


class Event:
    """The moment when a stream was told to record it; before that, there is nothing to wait for."""

    def __init__(self):
        self.moment = Moment()

    def record(self, stream: Stream) -> None:
        self.moment = Moment(stream)
        stream.tell(self.moment.reach)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self.moment.wait()


@contextmanager
def late(*kinds: str):
    """Let "computes", "copies" from pinned memory on another stream, or both be done as late as they can be."""
    Stream.late = set(kinds)
    try:
        yield
    finally:
        Stream.late = set()
        for stream in Stream.every:
            stream.catch_up()


class PretendModule:
    """What PyTorch asks about a kind of device (it stands for `torch.cuda`)."""

    Stream, Event = Stream, Event
    now = Stream(kind="computes")  # of both devices

    def current_stream(self, device=None):
        return PretendModule.now

    @contextmanager
    def stream(self, stream):
        before, PretendModule.now = PretendModule.now, stream
        try:
            yield
        finally:
            PretendModule.now = before

    def is_initialized(self):
        return True

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def device_count(self):
        return 2

    def _is_in_bad_fork(self):
        return False

    def manual_seed_all(self, seed):
        pass


class PretendTensor(torch.Tensor):
    """A tensor on a pretend device; `raw` has its numbers, on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw, device):
        options = {
            "strides": raw.stride(),
            "storage_offset": raw.storage_offset(),
            "dtype": raw.dtype,
            "device": device,
        }
        with torch.inference_mode(False):  # one that is made in it could not be detached
            return torch.Tensor._make_wrapper_subclass(cls, raw.shape, **options)

    def __init__(self, raw, device):
        self.raw = raw

    def __repr__(self):
        return f"{self.raw!r} on {self.device}"

    def record_stream(self, stream):
        """Do nothing: what waits in a stream keeps its memory."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func.overloadpacket is aten.to:  # in inference mode it comes whole; elsewhere as the copy that it makes
            return func.decompose(*args, **kwargs)
        if func is aten._has_compatible_shallow_copy_type.default:
            return False  # `Module.to` then makes a new parameter
        tensors = tensors_in((args, kwargs))
        if func is aten.copy_.default:
            note(args[1], args[0].device)
            copy(args[0], *args[1:])
            return args[0]
        device = where(func, tensors, kwargs)
        if func is aten._to_copy.default:
            note(tensors[0], device)
            PretendModule.now.catch_up()  # the numbers are wanted now
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        at_once = func is aten._to_copy.default or not Stream.late
        result = (func if at_once else later(func))(*tree_map(raw, args), **tree_map(raw, kwargs))
        if func.overloadpacket.__name__.endswith("_"):
            return args[0]
        on_device = device.type == NAME
        return tree_map(lambda t: PretendTensor(t, device) if on_device and isinstance(t, torch.Tensor) else t, result)


def later(func):
    """Make a function compute when the stream comes to it; what it returns now has only the right shape."""

    def tell(*args, **kwargs):
        if func.overloadpacket.__name__.endswith("_"):
            return PretendModule.now.tell(lambda: func(*args, **kwargs))
        if any(argument.alias_info for argument in func._schema.arguments):  # a view, right already
            return func(*args, **kwargs)
        result = func(*tree_map(scratch, args), **tree_map(scratch, kwargs))

        def compute():
            for tensor, right in zip(tensors_in(result), tensors_in(func(*args, **kwargs)), strict=True):
                tensor.copy_(right)

        PretendModule.now.tell(compute)
        return result

    return tell


def scratch(value):
    """Copy a tensor; anything else is what it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def tensors_in(values) -> list[torch.Tensor]:
    """List the tensors in nested values."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def memories(values) -> set[int]:
    """Say where the tensors in nested values have their numbers."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(values)}


def copy(target, source, non_blocking=False) -> None:
    """Copy numbers into a tensor: from pinned memory when the stream comes to it, else now."""
    stream, pinned = PretendModule.now, non_blocking and raw(source) is source and source.is_pinned()
    if pinned or (isinstance(source, PretendTensor) and isinstance(target, PretendTensor)):
        stream.tell(lambda: raw(target).copy_(raw(source)))
    else:
        stream.catch_up()
        raw(target).copy_(raw(source))


def raw(value):
    """Take the numbers of a pretend tensor; anything else is what it is."""
    return value.raw if isinstance(value, PretendTensor) else value


def where(func, tensors: list, kwargs: dict) -> torch.device:
    """Say where a result will be; raises RuntimeError when the operands are on several devices."""
    devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type == NAME}
    if func is not aten._to_copy.default and len(devices) > 1:
        raise RuntimeError(
            f"{func}: all tensors must be on one device, these are on {', '.join(sorted(map(str, devices)))}"
        )
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else next(iter(devices))
    return torch.device(NAME, 0) if device.type == NAME and device.index is None else device


def note(tensor: torch.Tensor, target: torch.device) -> None:
    """Note a copy in the log, if it leaves its device."""
    if tensor.device != target:
        LOG.append(Transfer(str(tensor.device), str(target), tensor.nbytes))


def install() -> None:
    """Make `gpu:0` and `gpu:1` devices of this process; a second call does nothing."""
    if torch._C._get_privateuse1_backend_name() == NAME:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=PretendModule())

    @torch.library.impl("aten::empty.memory_format", "privateuseone")
    def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
        return PretendTensor(torch.empty(size, dtype=dtype), torch.device(NAME, device.index or 0))

    @torch.library.impl("aten::empty_strided", "privateuseone")
    def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
        return PretendTensor(torch.empty_strided(size, stride, dtype=dtype), torch.device(NAME, device.index or 0))

    @torch.library.impl("aten::_copy_from", "privateuseone")
    def copy_from(source, target, non_blocking=False):
        note(source, target.device)
        copy(target, source, non_blocking)
        return target

    @torch.library.impl("aten::is_pinned", "CPU")
    def is_pinned(tensor, device=None):
        return bool(memories(tensor) & memories(PINNED))

    @torch.library.impl("aten::_pin_memory", "CPU")
    def pin_memory(tensor, device=None):
        PINNED.append(tensor.clone())
        return PINNED[-1]
