"""A pretend accelerator for a machine that has none: two devices, real numbers, and a log of every transfer.

After `install()`, `gpu:0` and `gpu:1` are devices of PyTorch. Their tensors compute on the CPU, refuse to meet a
tensor of another device, and each copy between devices is noted in `LOG` with its bytes. So a laptop shows what
moves in a machine with two GPUs, and what would fail there.

It rests on a private interface of torch 2.13, works once per process, and needs `no_grad` or `inference_mode`: the
lessons on hooks and on a language model use it, and tests do in processes of their own. There are no streams and no
pinned memory.
"""

from typing import NamedTuple

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


class PretendModule:
    """What PyTorch asks about a kind of device (it stands for `torch.cuda`)."""

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
        return torch.Tensor._make_wrapper_subclass(cls, raw.shape, **options)

    def __init__(self, raw, device):
        self.raw = raw

    def __repr__(self):
        return f"{self.raw!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func.overloadpacket is aten.to:  # in inference mode it comes whole; elsewhere as the copy that it makes
            return func.decompose(*args, **kwargs)
        if func is aten._has_compatible_shallow_copy_type.default:
            return False  # `Module.to` then makes a new parameter
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if func is aten.copy_.default:
            note(args[1], args[0].device)
            raw(args[0]).copy_(raw(args[1]))
            return args[0]
        device = where(func, tensors, kwargs)
        if func is aten._to_copy.default:
            note(tensors[0], device)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        result = func(*tree_map(raw, args), **tree_map(raw, kwargs))
        if func.overloadpacket.__name__.endswith("_"):
            return args[0]
        on_device = device.type == NAME
        return tree_map(lambda t: PretendTensor(t, device) if on_device and isinstance(t, torch.Tensor) else t, result)


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
        raw(target).copy_(raw(source))
        return target
