"""Step 6: hooks that bring a block to the device that runs it, and put it back.

You learn why weights move in a swapped `forward`, why the block is the unit, and how a weight that is elsewhere
is kept from computing garbage.
Dispatches the model of step 2 by a plan of step 5 and prints for each offloaded block meta -> device -> meta,
the peak, and that the logits are the plain model's. Reads the checkpoint of step 2.
"""

import argparse
import copy
import dataclasses
import functools
import operator
import threading
import time
import warnings
from collections import ChainMap, namedtuple
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress

try:
    from step01_model_def.model_def import fixed_sequences, raise_all, run_script
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from step02_checkpoint.build_checkpoint import ensure_checkpoint
from step03_meta_build.meta_build import dress
from step04_to_empty_load.load_with_meta import (
    empty_as, find_tied_parameters, get_tensor, load_plain, named_tensors, names_by_tensor, retie_parameters, run,
    set_tensor,
)  # fmt: skip
from step05_device_map.device_map import (
    Unit, accelerators, attempt, blocks_under, cut_into_units, infer_auto_device_map, normalize_device, own_tensors,
    resolve_device_map,
)  # fmt: skip

# --- a parked weight --------------------------------------------------------------------------------------


class ParkedWeightError(RuntimeError):
    """Something computes with a weight whose values are elsewhere."""


QUESTIONS = {  # what may be asked of a weight that is elsewhere; anything else would compute with it
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "size", "dim", "numel", "stride", "names"),
    *("element_size", "requires_grad", "requires_grad_", "grad", "grad_fn", "data", "detach", "__repr__", "__hash__"),
    *("__len__", "_version", "retains_grad", "output_nr", "_backward_hooks", "__deepcopy__", "storage_offset"),
}


class Parked:
    """A stand-in without values: it answers questions about shape, dtype and device, and refuses to compute.

    A plain meta tensor does not refuse: on the CPU, `F.linear(real, meta)` returns uninitialised numbers.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__", "__delete__") else func.__name__
        if name not in QUESTIONS and (not name.startswith("is_") or name == "is_nonzero"):
            parked = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, Parked))
            raise ParkedWeightError(parked.advice(name))
        with torch._C.DisableTorchFunctionSubclass():
            answer = func(*args, **(kwargs or {}))
            if name in ("data", "detach"):  # a view of nothing is parked like it
                answer = answer.as_subclass(cls)
                answer.__dict__.update(args[0].__dict__)
            return answer

    def advice(self, name: str) -> str:
        """Say what went wrong, and both ways to mend it."""
        what = f"{self.full_name} is parked: its values are elsewhere, and {name!r} would compute with nothing"
        mend = f"If another module's forward reads it, make that one block: preload_module_classes=[{self.reader!r}]"
        return f"{what}. {mend}. Outside a forward, bring it in by `with align_module_device(module):`"

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), park(self, self.full_name, self.reader))

    def __reduce_ex__(self, protocol):
        return rebuild_parked, (type(self), self.shape, self.stride(), self.dtype, self.requires_grad, self.__dict__)


class ParkedParameter(Parked, nn.Parameter):
    """A parked parameter; an `nn.Parameter` to whoever asks."""


class ParkedBuffer(Parked, torch.Tensor):
    """A parked buffer."""


def rebuild_parked(cls, shape, stride, dtype, requires_grad, attributes):
    """Make a parked weight anew, after a copy or from a pickle."""
    parked = torch.empty_strided(shape, stride, dtype=dtype, device="meta").as_subclass(cls)
    parked.__dict__.update(attributes)
    parked.requires_grad_(requires_grad)
    return parked


def park(tensor: torch.Tensor, full_name: str, reader: str) -> torch.Tensor:
    """Make the stand-in for a tensor; `reader` is the class whose forward may read it by mistake."""
    cls = ParkedParameter if isinstance(tensor, nn.Parameter) else ParkedBuffer
    like = tensor.like if isinstance(tensor, Parked) else dress(torch.empty(0), tensor)  # its class and attributes
    attributes = {"like": like, "full_name": full_name, "reader": reader}
    return rebuild_parked(cls, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, attributes)


def set_module_tensor_to_device(
    module: nn.Module, tensor_name: str, device, value: torch.Tensor | None = None, dtype=None, tied_params_map=None,
    non_blocking: bool = False,
) -> None:  # fmt: skip
    """Put a module's parameter or buffer on a device, with a new value if one is given.

    The dtype stays unless one is given; integers and bools are not converted. `tied_params_map` is a dict in
    which tensors that were moved are kept, so that a tied one is moved once.
    Raises ValueError, with the full name, for a name that is none, a value that is missing or of another shape.
    """
    old = dict(named_tensors(module)).get(tensor_name)
    if old is None:
        raise ValueError(f"{tensor_name} names no parameter or buffer of {type(module).__name__}")
    source = old if value is None else value
    if source.shape != old.shape:
        raise ValueError(f"{tensor_name} is {list(old.shape)}, the value {list(source.shape)}")
    if source.is_meta and torch.device(device).type != "meta":
        raise ValueError(f"{tensor_name} is on the meta device: give its value")
    known, key = ({} if tied_params_map is None else tied_params_map), (id(source), str(device))
    if key not in known:
        wanted = (dtype or old.dtype) if source.is_floating_point() or old.is_floating_point() else source.dtype
        known[key] = dress(source.to(device=device, dtype=wanted, non_blocking=non_blocking), old)
    set_tensor(module, tensor_name, known[key])


# --- hooks ------------------------------------------------------------------------------------------------


class ModelHook:
    """What happens around a module's forward; the base of all hooks, which does nothing.

    With `no_grad`, the forward itself runs without gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare a module when the hook is added to it."""
        return module

    def pre_forward(self, module: nn.Module, *args, **kwargs) -> tuple[tuple, dict]:
        """Run before the forward; returns its arguments."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output):
        """Run after the forward; returns its output."""
        return output

    def release(self, module: nn.Module) -> None:
        """Run last, also when the forward or `pre_forward` raised."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` when the hook is removed."""
        return module


class SequentialHook(ModelHook):
    """Several hooks on one module; `hooked_forward` runs them in order."""

    def __init__(self, *hooks: ModelHook):
        self.hooks = [inner for hook in hooks for inner in getattr(hook, "hooks", [hook])]

    def init_hook(self, module):
        return functools.reduce(lambda m, hook: hook.init_hook(m), self.hooks, module)

    def detach_hook(self, module):
        return functools.reduce(lambda m, hook: hook.detach_hook(m), self.hooks, module)


def hooked_forward(module: nn.Module, *args, **kwargs):
    """Be the forward of a module that has hooks: before, the module's own forward, after."""
    if torch.compiler.is_compiling():  # what moves weights is not compiled; without a compiler, none is loaded
        return torch.compiler.disable(hooked_forward)(module, *args, **kwargs)
    hooks = getattr(module._hf_hook, "hooks", [module._hf_hook])
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.release, module)
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        with torch.no_grad() if any(hook.no_grad for hook in hooks) else nullcontext():
            output = module._old_forward(*args, **kwargs)
        return functools.reduce(lambda result, hook: hook.post_forward(module, result), hooks, output)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Add a hook to a module, in place of the one it has or, with `append`, after it; returns the module.

    The module's `forward` is swapped: PyTorch's own hooks cannot change what a forward raises, and run in no
    order that we choose. Its signature and docstring stay.
    """
    if "_hf_hook" in vars(module):
        if append:
            module._hf_hook = SequentialHook(module._hf_hook, hook)
            return hook.init_hook(module)
        remove_hook_from_module(module)
    module = hook.init_hook(module)
    module._hf_hook, module._old_forward = hook, module.forward
    module.forward = functools.update_wrapper(functools.partial(hooked_forward, module), module._old_forward)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's hook, and with `recurse` its children's; its forward and its values are its own again."""
    if "_hf_hook" in vars(module):
        module._hf_hook.detach_hook(module)
        own = vars(module).pop("_old_forward")
        vars(module).pop("_apply", None)  # the refusal to be moved, on the root of a dispatched model
        del module._hf_hook, module.forward
        if getattr(own, "__func__", None) is not type(module).forward:
            module.forward = own  # it was the instance's
    for child in module.children() if recurse else []:
        remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of everything in it."""
    remove_hook_from_module(module, recurse=True)


def send_to_device(obj, device, skip_keys: str | list[str] | None = None):
    """Move all tensors in nested lists, tuples, mappings and dataclasses; returns a like object.

    What has a `.to` of its own is moved by it. Mapping keys in `skip_keys` are left where they are, like a
    cache that stays on its devices. Anything else comes back as it is.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else skip_keys or []

    def send(value):
        return send_to_device(value, device, skipped)

    if hasattr(obj, "to") and not isinstance(obj, nn.Module | type):
        return obj.to(device)
    if isinstance(obj, list | tuple):
        sent = [*map(send, obj)]
        if all(map(operator.is_, sent, obj)):
            return obj
        return type(obj)(*sent) if hasattr(obj, "_fields") else type(obj)(sent)
    if isinstance(obj, Mapping):
        sent = {key: value if key in skipped else send(value) for key, value in obj.items()}
        if all(sent[key] is obj[key] for key in obj):
            return obj
        like = copy.copy(obj)
        for key in obj:
            like[key] = sent[key]
        return like
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        names = [field.name for field in dataclasses.fields(obj) if field.init and field.name not in skipped]
        return dataclasses.replace(obj, **{name: send(getattr(obj, name)) for name in names})
    return obj


def first_device(obj) -> torch.device | None:
    """Find the device of the first tensor in nested arguments."""
    if isinstance(obj, torch.Tensor):
        return obj.device
    obj = vars(obj) if dataclasses.is_dataclass(obj) and not isinstance(obj, Mapping) else obj
    values = obj.values() if isinstance(obj, Mapping) else obj if isinstance(obj, list | tuple) else []
    return next((device for value in values if (device := first_device(value)) is not None), None)


class AlignDevicesHook(ModelHook):
    """Brings a module's inputs, and with `offload` its weights, to `execution_device` for its forward.

    `weights_map` holds the weights that are elsewhere, by full name (`module_name` and the name in the
    module); without one, the module's own are kept in RAM. Buffers stay on the execution device unless
    `offload_buffers`. With `place_submodules` the module is one block: all in it comes and goes together.
    With `io_same_device` the output returns to the input's device. Of tied weights, `aliases` has the one name
    that is in `weights_map`, and `tied_params_map` those that are on the execution device under another name.
    One thread at a time runs a module that has this hook. The idea and the name are Accelerate's.
    """

    def __init__(
        self, execution_device=None, offload=False, io_same_device=False, weights_map=None, offload_buffers=False,
        place_submodules=False, skip_keys=None, tied_params_map=None, module_name="", reader="", source="cpu",
        aliases=None,
    ):  # fmt: skip
        self.execution_device, self.offload, self.io_same_device = execution_device, offload, io_same_device
        self.weights_map, self.offload_buffers = {} if weights_map is None else weights_map, offload_buffers
        self.place_submodules, self.skip_keys = place_submodules, skip_keys
        self.tied_params_map, self.aliases, self.reader = tied_params_map or {}, aliases or {}, reader
        self.prefix = f"{module_name}." if module_name else ""
        self.source, self.parked, self.brought, self.calls, self.lock = source, {}, {}, [], threading.RLock()
        self.ahead = self.slot = None  # see `copy_ahead`

    def __getstate__(self):
        return self.__dict__ | {"lock": None, "ahead": None, "slot": None}

    def __setstate__(self, state):
        self.__dict__.update(state, lock=threading.RLock())

    def tensors(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """List what this hook is for: the module's own tensors, or all in it if it is one block."""
        modules = module.named_modules() if self.place_submodules else [("", module)]
        return [(f"{name}.{key}".lstrip("."), t) for name, m in modules for key, t in own_tensors(m).items()]

    def to_bring(self) -> dict[str, torch.Tensor]:
        """List the stand-ins whose values must come from elsewhere, by their names in `weights_map`."""
        here = self.tied_params_map
        return {parked.full_name: parked for name, parked in self.parked.items() if self.prefix + name not in here}

    def init_hook(self, module):
        for name, tensor in self.tensors(module):
            if self.offload and (isinstance(tensor, nn.Parameter) or self.offload_buffers):
                key = self.aliases.get(self.prefix + name, self.prefix + name)
                if not isinstance(tensor, Parked):  # else another block that shares the module has parked it
                    if key not in self.weights_map:
                        self.weights_map[key] = moved(tensor, "cpu")
                    tensor = park(tensor, key, self.reader or type(module).__name__)
                self.parked[name] = tensor
                set_tensor(module, name, tensor)
            elif self.execution_device is not None and not tensor.is_meta:
                set_tensor(module, name, moved(tensor, self.execution_device))
        if self.parked:
            self.handle = module.register_state_dict_post_hook(functools.partial(fill_state_dict, self))
        return module

    def pre_forward(self, module, *args, **kwargs):
        self.lock.acquire()
        self.calls.append(None)
        if self.io_same_device:
            self.calls[-1] = first_device([args, kwargs])
        if len(self.calls) == 1:
            self.bring(module)
        if self.execution_device is not None:
            args = send_to_device(args, self.execution_device)
            kwargs = send_to_device(kwargs, self.execution_device, self.skip_keys)
        return args, kwargs

    def post_forward(self, module, output):
        device = self.calls[-1]
        return output if device is None else send_to_device(output, device, self.skip_keys)

    def release(self, module):
        try:
            self.calls.pop()
            if not self.calls:
                self.drop(module)
        finally:
            self.lock.release()

    def bring(self, module: nn.Module) -> None:
        """Give the module its values, on the execution device, in place of the stand-ins."""
        if self.brought:
            return  # by `BringFirstLayer`, a moment ago
        self.slot = self.ahead.take(self) if self.ahead else None
        if self.slot is None:
            trace("bring", self)
        weights = self.slot.views if self.slot else self.weights_map
        for name, parked in self.parked.items():
            if not isinstance(get_tensor(module, name), Parked):
                continue  # somebody gave the module a value of its own
            here = self.tied_params_map.get(self.prefix + name)
            value = unpark(parked, weights[parked.full_name], self.execution_device) if here is None else here
            if value.requires_grad and torch.is_grad_enabled():
                warn_of_grad_mode()
                value.register_hook(functools.partial(refuse_gradient, self.prefix + name))
            self.brought[name] = value, version_of(value)
            set_tensor(module, name, value)
        trace("run", self)

    def drop(self, module: nn.Module) -> None:
        """Put the stand-ins back; what the forward has changed, like BatchNorm's statistics, is kept."""
        trace("drop", self)
        while self.brought:
            self.put_back(module, *self.brought.popitem())
        trace("end", self)
        if self.slot is not None:
            slot, self.slot = self.slot, None
            self.ahead.give_back(slot)

    def put_back(self, module: nn.Module, name: str, brought: tuple[torch.Tensor, int | None]) -> None:
        """Put one stand-in back."""
        (value, version), current = brought, get_tensor(module, name)
        kept = isinstance(value, nn.Parameter) and version_of(value) == version  # batch_norm counts no version
        if not isinstance(current, Parked) and not (current is value and kept):
            with torch.inference_mode(False):
                self.weights_map[self.parked[name].full_name] = unpark(self.parked[name], current, "cpu")
        set_tensor(module, name, self.parked[name])

    def detach_hook(self, module):
        for name, parked in self.parked.items():
            if isinstance(get_tensor(module, name), Parked):
                stored = self.weights_map[parked.full_name]
                stored = stored.clone() if self.source == "disk" else stored  # its file may go
                own = type(stored) is type(parked.like) and stored.dtype == parked.dtype
                value = stored if own else unpark(parked, stored, None)
                set_tensor(module, name, value.requires_grad_(parked.requires_grad))
        if self.parked:
            self.handle.remove()
            self.parked = {}
        return module


class BringFirstLayer(ModelHook):
    """Brings the first layer of an `nn.TransformerEncoder` before its forward, a moment early.

    It looks at that layer's weights before it calls it: stand-ins would make it choose another path, with
    other values at padded positions.
    """

    def pre_forward(self, module, *args, **kwargs):
        for hook in align_hooks(module.layers[0]):
            hook.bring(module.layers[0])
        return args, kwargs

    def release(self, module):
        for hook in [hook for hook in align_hooks(module.layers[0]) if hook.brought and not hook.calls]:
            hook.drop(module.layers[0])  # the encoder has not called it


def fill_state_dict(hook: AlignDevicesHook, module, state_dict, prefix, local_metadata) -> None:
    """Put the real values into a state dict, for which the module has only stand-ins."""
    for key, value in state_dict.items():
        if isinstance(value, Parked) and value.full_name in hook.weights_map:
            state_dict[key] = hook.weights_map[value.full_name].detach()


def unpark(parked: torch.Tensor, value: torch.Tensor, device) -> torch.Tensor:
    """Make the real tensor for a stand-in: values on a device, in the stand-in's dtype, class and attributes."""
    value = dress(value.detach().to(device=device, dtype=parked.dtype), parked.like)
    return value.requires_grad_(parked.requires_grad)


def moved(tensor: torch.Tensor, device) -> torch.Tensor:
    """Move a parameter or buffer; it stays the same object where it is there already."""
    new = tensor.detach().to(device)
    return tensor if new.device == tensor.device else dress(new, tensor)


def version_of(tensor: torch.Tensor) -> int | None:
    """Read how often a tensor was changed in place; tensors made in inference mode do not count it."""
    return None if tensor.is_inference() else tensor._version


def refuse_gradient(name: str, gradient):
    """Refuse a backward that reaches an offloaded weight."""
    lost = "its weight is dropped after each forward, and the gradient would be lost with it"
    raise RuntimeError(f"a gradient has reached {name}, which is offloaded: {lost}; undispatch(model) to train")


@functools.cache
def warn_of_grad_mode() -> None:
    """Say once that autograd keeps what offloading drops."""
    text = "an offloaded model runs with gradients: autograd keeps every weight alive, so no memory is saved"
    warnings.warn(f"{text}. Run it under torch.inference_mode()", stacklevel=2)


# --- copying ahead ----------------------------------------------------------------------------------------


class Slot:
    """Room for one block on an accelerator, and as much pinned memory in RAM, through which blocks get there.

    A copy from pinned memory runs by itself, beside the host and the compute. Two events say how far things are.
    `copied`: the block is on the device, where it may be read, and its pinned memory may be overwritten. `computed`:
    nothing reads the room any more, and it may be overwritten.
    """

    def __init__(self, size: int, device: torch.device):
        self.size, self.device, self.streams = size, device, torch.get_device_module(device)
        self.copied, self.computed = self.streams.Event(), self.streams.Event()
        self.origins, self.views, self.in_use = {}, {}, False
        self.make_room()
        with torch.inference_mode(False):  # a tensor made in inference mode could not be overwritten outside of it
            self.pinned = torch.empty(size, dtype=torch.uint8).pin_memory()

    @torch.inference_mode(False)
    def make_room(self) -> None:
        """Take memory on the device, in which nothing is yet."""
        self.room = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        self.block, self.users = None, 0

    def holds(self, block: AlignDevicesHook) -> bool:
        """Tell whether a block was copied here, and is still what it is copied from."""
        if self.block is not block:
            return False
        now, then = origins(block), self.origins
        return all(now[name][0] is then[name][0] and now[name][1] == then[name][1] for name in then)

    def count_users(self) -> int:
        """Count the tensors that lie in the room."""
        return torch._C._storage_Use_Count(self.room.untyped_storage()._cdata)


class CopyAhead:
    """Two slots, through which the offloaded blocks of a model pass in turn: one computes, the next is copied.

    `successor` has for each block the one that ran after it the last time. It is only a hint: a block that is in no
    slot when it runs is copied then. The host fills pinned memory while the accelerator computes what it was
    told to before, so no thread is needed.
    """

    def __init__(self, blocks: list[AlignDevicesHook], device: torch.device):
        self.device, self.streams, self.lock = device, torch.get_device_module(device), threading.Lock()
        self.stream, self.last = self.streams.Stream(device), None
        size = max(sum(aligned(parked.nbytes) for parked in block.to_bring().values()) for block in blocks)
        self.slots = Slot(size, device), Slot(size, device)
        for slot in self.slots:
            slot.computed.record(self.streams.current_stream(device))  # earlier orders may still use that memory
        self.successor = dict(zip(blocks, blocks[1:] + blocks[:1], strict=True))  # until it has run once

    def take(self, block: AlignDevicesHook) -> Slot | None:
        """Give the slot that has a block, and let what computes wait for the copy; None if both are in use."""
        with self.lock:
            self.successor[self.last] = block
            self.last = block
            free = [slot for slot in self.slots if not slot.in_use]
            if not free or torch.is_grad_enabled():  # autograd would keep what is overwritten
                return None
            slot = next((slot for slot in free if slot.holds(block)), None)
            if slot is None:
                slot = free[0]
                self.fill(slot, block)
            slot.in_use = True
            self.streams.current_stream(self.device).wait_event(slot.copied)
            return slot

    def give_back(self, slot: Slot) -> None:
        """Take back a slot when the accelerator was told all that reads it, and copy the next block to the other."""
        with self.lock:
            if slot.count_users() > slot.users:  # a part of a weight was returned, or kept: leave it the memory
                slot.make_room()
            slot.computed.record(self.streams.current_stream(self.device))
            slot.in_use = False
            following = self.successor[self.last]
            free = [other for other in self.slots if other is not slot and not other.in_use]
            if free and not any(other.holds(following) for other in self.slots):
                with suppress(Exception):  # only a hint: when the block runs, it is copied then, or says why not
                    self.fill(free[0], following)

    @torch.inference_mode(False)
    @torch.no_grad()
    def fill(self, slot: Slot, block: AlignDevicesHook) -> None:
        """Copy a block to pinned memory now, and from there to the device while others compute."""
        trace("bring", block)
        slot.block, slot.views, end = None, {}, 0
        slot.copied.synchronize()  # the pinned memory has been read
        slot.origins = origins(block)
        for name, parked in block.to_bring().items():
            value = block.weights_map[name]
            like = empty_as(value, "meta", parked.dtype)  # strides, too, as `.to` makes them
            begin, end = end, end + aligned(like.nbytes)
            view_as(slot.pinned[begin:end], like).copy_(value)
            slot.views[name] = view_as(slot.room[begin:end], like).data  # `data`: if one is changed, not all are
        self.stream.wait_event(slot.computed)
        with self.streams.stream(self.stream):
            slot.room[:end].copy_(slot.pinned[:end], non_blocking=True)
            slot.copied.record(self.stream)
        slot.room.record_stream(self.stream)  # if the model goes now, nobody gets its memory before the copy is done
        slot.block, slot.users = block, slot.count_users()


def aligned(size: int) -> int:
    """Round a number of bytes up to a multiple of 512, where PyTorch begins a tensor on an accelerator."""
    return -(-size // 512) * 512


def view_as(room: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor of bytes: the dtype, shape and strides are those of another."""
    return room[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def origins(block: AlignDevicesHook) -> dict[str, tuple]:
    """Say where a block's values come from, without reading them: a tensor and its version, or a file's entry."""
    found = {}
    for name in block.to_bring():
        part = next(part for part in getattr(block.weights_map, "maps", [block.weights_map]) if name in part)
        source = getattr(part, "weights", part)[name]  # step 7's mapping has entries of files
        found[name] = source, version_of(source) if isinstance(source, torch.Tensor) else 0
    return found


def copy_ahead(model: nn.Module) -> nn.Module:
    """Copy the next block to the accelerator while one computes; returns the model, which is dispatched already.

    It takes memory for two blocks of the largest one's size, on the device and, pinned, in RAM: plan with the
    `headroom` of one. Where nothing is copied beside the compute (the CPU, MPS), blocks are brought as before.
    """
    blocks = [hook for module in model.modules() for hook in align_hooks(module) if hook.to_bring()]
    for device in {torch.device(block.execution_device) for block in blocks}:
        if device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream"):
            here = [block for block in blocks if torch.device(block.execution_device) == device]
            ahead = CopyAhead(here, device)
            for block in here:
                block.ahead = ahead
    return model


# --- what happened ----------------------------------------------------------------------------------------


# A moment of a block; its kind is "bring", "run" (it is there), "drop" or "end" (it is gone).
Event = namedtuple("Event", "seconds kind block bytes source device")


class OffloadTrace:
    """Records, while it is entered, when each block of a dispatched model is brought, runs and is dropped.

    `events` in order; `resident_bytes` on the executing device before and after each; `peak_resident_bytes`.
    """

    active: list["OffloadTrace"] = []

    def __init__(self, model: nn.Module):
        self.model, self.events, self.resident_bytes = model, [], []

    def __enter__(self):
        self.hooks = [hook for module in self.model.modules() for hook in align_hooks(module)]
        devices = [torch.device(hook.execution_device) for hook in self.hooks if hook.parked]
        held = {id(t): t.nbytes for _, t in named_tensors(self.model) if t.device in devices or not devices}
        slots = {id(slot): slot.room.nbytes for hook in self.hooks if hook.ahead for slot in hook.ahead.slots}
        self.now, self.start = sum(held.values()) + sum(slots.values()), time.perf_counter()
        OffloadTrace.active.append(self)
        return self

    def __exit__(self, *error):
        OffloadTrace.active.remove(self)

    @property
    def peak_resident_bytes(self) -> int:
        """The most bytes of weights that were on the executing device at once."""
        return max(self.resident_bytes, default=self.now)

    def record(self, kind: str, hook: "AlignDevicesHook") -> None:
        """Note that something begins or ends for a hook's block."""
        size = sum(p.nbytes for name, p in hook.parked.items() if hook.prefix + name not in hook.tied_params_map)
        self.now += {"run": size, "end": -size}.get(kind, 0) if hook.slot is None else 0  # a slot is always there
        self.resident_bytes.append(self.now)
        name, device = hook.prefix.removesuffix("."), str(hook.execution_device)
        self.events.append(Event(time.perf_counter() - self.start, kind, name, size, hook.source, device))


def trace(kind: str, hook: "AlignDevicesHook") -> None:
    """Tell the traces that are recording."""
    for recording in OffloadTrace.active:
        if hook in recording.hooks:
            recording.record(kind, hook)


def align_hooks(module: nn.Module) -> list["AlignDevicesHook"]:
    """List the hooks of a module that move weights or inputs."""
    hook = vars(module).get("_hf_hook")
    return [h for h in getattr(hook, "hooks", [hook]) if isinstance(h, AlignDevicesHook)]


# --- a model under a device map ---------------------------------------------------------------------------


def real_device(device: int | str | torch.device) -> torch.device:
    """Turn a map's device into this machine's; without an accelerator, the CPU plays device 0.

    Raises ValueError for one that the machine lacks, naming what it has.
    """
    number, found = normalize_device(device), accelerators()
    if number == "cpu" or (number == 0 and not found):
        return torch.device("cpu")
    if number == "disk" or number >= len(found):
        has = ", ".join(map(str, found)) or "no accelerator, and the CPU plays device 0"
        raise ValueError(f"device {device!r} does not exist here: this machine has {has}")
    return found[number]


def dispatch_model(
    model: nn.Module, device_map: dict, main_device=None, state_dict: Mapping | None = None,
    weights_map: Mapping | None = None, offload_buffers: bool = False, skip_keys=None,
    preload_module_classes: list[str] | None = None, force_hooks: bool = False,
) -> nn.Module:  # fmt: skip
    """Make a model run as a device map says; returns it.

    Entries on accelerators become resident, the others are brought to the executing device, the first
    accelerator in the map, block by block. The offloaded values are taken from `weights_map`, else from
    `state_dict`, else from the model itself, which then keeps them in RAM. `preload_module_classes` names
    further classes that are one block. With one device and nothing offloaded no hook is added.
    Raises ValueError, before anything changes, with all that the model or the machine cannot honour.
    """
    resolved = resolve_device_map(model, device_map)
    numbers = {device for device in resolved.values() if isinstance(device, int)}
    main = normalize_device(min(numbers, default="cpu") if main_device is None else main_device)
    kinds = {"disk", "cpu"} if main != "cpu" or main_device is not None else {"disk"}
    away = {name: device for name, device in resolved.items() if device in kinds}
    values = ChainMap({}, weights_map or {}, state_dict or {})
    if 0 in {*numbers, main} and not accelerators():
        print("note=no accelerator here: device 0 is played by the CPU")
    units = units_to_hook(model, preload_module_classes, device_map)
    raise_all(list_obstacles(model, units, resolved, main, away, values, offload_buffers), "cannot dispatch: ")
    devices = {device: real_device(device) for device in {*resolved.values(), main} - {"disk"}}
    tied = find_tied_parameters(model)
    place_residents(model, {name: devices[d] for name, d in resolved.items() if name not in away}, values)
    model.hf_device_map = dict(device_map)
    if not away and len(set(resolved.values())) == 1 and not force_hooks:
        return model
    aliases = {n: next((o for o in g if o in values), g[0]) for g in tied for n in g}
    here = {n: get_tensor(model, r) for g in tied for r in g if resolved[r] == main for n in g if n in away}
    for unit in units:
        first = next(iter(unit.tensors))
        device = devices[main if first in away else resolved[first]]
        options = {"weights_map": values, "aliases": aliases, "tied_params_map": here, "source": away.get(first, "")}
        options |= {"offload_buffers": offload_buffers, "skip_keys": skip_keys}
        hook_unit(model, unit, device, first in away, **options)
    for module in [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]:
        add_hook_to_module(module, BringFirstLayer(), append=True)
    if not align_hooks(model):
        add_hook_to_module(model, AlignDevicesHook(devices[main], skip_keys=skip_keys), append=True)
    align_hooks(model)[0].io_same_device = True
    model._tied_before = tied
    model._apply = refuse_move
    return model


def place_residents(model: nn.Module, homes: dict[str, torch.device], values: Mapping) -> None:
    """Put what is resident on its device, ties included; what is on meta takes its value from `values`."""
    for names in names_by_tensor(model):
        resident = [name for name in names if name in homes]
        for device in {homes[name] for name in resident}:
            old = get_tensor(model, resident[0])
            if old.is_meta and values:
                old = dress(values[next(name for name in names if name in values)].to(old.dtype), old)
            new = moved(old, device)
            for name in resident:
                if homes[name] == device:
                    set_tensor(model, name, new)


def units_to_hook(model: nn.Module, preload: list[str] | None, device_map: Mapping) -> list[Unit]:
    """Cut a model into what comes and goes together: blocks, the classes named for preloading, leaves."""
    modules = model.named_modules(remove_duplicate=False)
    blocks = blocks_under(model, device_map) | {name for name, m in modules if type(m).__name__ in (preload or [])}
    return [unit for unit in cut_into_units(model, blocks)[0] if unit.tensors]


def hook_unit(model: nn.Module, unit: Unit, device, offload: bool, module_name: str = "", **options) -> None:
    """Give a unit its hook; a module that has two names gets one."""
    module = model.get_submodule(unit.name)
    if not align_hooks(module):
        reader = type(model.get_submodule(unit.name.rpartition(".")[0])).__name__
        name = ".".join(filter(None, [module_name, unit.name]))
        whole = unit.keys == [unit.name]
        hook = AlignDevicesHook(device, offload, place_submodules=whole, module_name=name, reader=reader, **options)
        add_hook_to_module(module, hook, append=True)


def attach_align_device_hook(
    module: nn.Module, execution_device=None, offload=False, module_name="", preload_module_classes=None, **options
) -> None:
    """Hook every unit of a module alike; `module_name` is the module's own name in `weights_map`.

    `options` are the hooks': `weights_map`, `offload_buffers`, `skip_keys`, `tied_params_map`.
    """
    for unit in units_to_hook(module, preload_module_classes, {}):
        hook_unit(module, unit, execution_device, offload, module_name, **options)


def attach_align_device_hook_on_blocks(
    module: nn.Module, execution_device, offload: bool | Mapping = False, module_name="", skip_keys=None, **options
) -> None:
    """Hook the modules named in `execution_device` or `offload`; the root's output returns to its input's device.

    `options` are those of `attach_align_device_hook`.
    """
    by_name = next((table for table in (execution_device, offload) if isinstance(table, Mapping)), {"": None})
    for name in by_name:
        device = execution_device[name] if isinstance(execution_device, Mapping) else execution_device
        away = offload[name] if isinstance(offload, Mapping) else offload
        full_name = ".".join(filter(None, [module_name, name]))
        attach_align_device_hook(module.get_submodule(name), device, away, full_name, skip_keys=skip_keys, **options)
    add_hook_to_module(module, AlignDevicesHook(io_same_device=True, skip_keys=skip_keys), append=True)


def attach_execution_device_hook(module: nn.Module, device, skip_keys=None, preload_module_classes=None) -> None:
    """Have every unit of a module run on a device, where its weights already are or now go."""
    attach_align_device_hook(module, device, preload_module_classes=preload_module_classes, skip_keys=skip_keys)


def list_obstacles(model, units, resolved, main, away, values, offload_buffers) -> list[str]:
    """Say everything that keeps a map from being honoured, one text a problem."""
    if any_hook(model):
        return ["the model is dispatched already; undispatch(model) first"]
    places = {unit.name or "the model": sorted({resolved[n] for n in unit.tensors}, key=str) for unit in units}
    problems = [f"{n} has its own tensors on {on}: give it one device" for n, on in places.items() if len(on) > 1]
    known = {n for g in names_by_tensor(model) if any(o in values for o in g) for n in g}
    for name, tensor in named_tensors(model):
        stays = name in away and not (offload_buffers or isinstance(tensor, nn.Parameter))
        if away.get(name) == "disk" and not stays and name not in known:
            problems.append(f"{name} is to be on disk: give a weights_map that reads it there (step 7)")
        elif tensor.is_meta and (stays or name not in known):
            problems.append(f"{name} is on the meta device and nothing gives its values: give a state_dict")
        elif name in away and name in values and values[name].shape != tensor.shape:
            problems.append(f"{name} is {list(values[name].shape)} there; the model wants {list(tensor.shape)}")
    for device in {main, *(set(resolved.values()) - {"disk"})}:
        attempt(problems, real_device, device)
    return problems


def any_hook(model: nn.Module) -> bool:
    """Tell whether any module of a model has a hook that moves weights or inputs."""
    return any(align_hooks(module) for module in model.modules())


def refuse_move(*args, **kwargs):
    """Refuse to move or convert a dispatched model."""
    raise RuntimeError("moving or converting a dispatched model would undo its device map; undispatch(model) first")


def undispatch(model: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Make a dispatched or offloaded model an ordinary one on one device: values, ties and methods as before."""
    remove_hook_from_submodules(model)
    model.__dict__.pop("hf_device_map", None)
    retie_parameters(model, model.__dict__.pop("_tied_before", []))
    place_residents(model, dict.fromkeys((name for name, _ in named_tensors(model)), torch.device(device)), {})
    return model


# --- shorter ways -----------------------------------------------------------------------------------------


def cpu_offload(
    model: nn.Module, execution_device=None, offload_buffers: bool = False, state_dict: Mapping | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:  # fmt: skip
    """Keep all weights in RAM, and bring each block to the execution device for its forward; returns the model.

    By default the execution device is the one that the parameters are on.
    """
    here = next((p.device for p in model.parameters() if not p.is_meta), "cpu")
    where = here if execution_device is None else execution_device
    return dispatch_model(model, {"": "cpu"}, where, state_dict, None, offload_buffers, None, preload_module_classes)


class UserCpuOffloadHook(ModelHook):
    """Moves a whole model to a device for its forward, and leaves it there until somebody offloads it.

    `offload()` puts the model back into RAM, `remove()` ends it. Accelerate has it in two classes.
    """

    def __init__(self, model: nn.Module, execution_device=None, prev_module_hook: "UserCpuOffloadHook | None" = None):
        self.model, self.prev_module_hook = model, prev_module_hook
        self.execution_device = real_device(execution_device or 0)

    def init_hook(self, module):
        return module.to("cpu")

    def pre_forward(self, module, *args, **kwargs):
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)

    def offload(self) -> None:
        self.model.to("cpu")

    def remove(self) -> None:
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module, execution_device=None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Offload a whole model that runs several times before another does, as in a pipeline of models."""
    hook = UserCpuOffloadHook(model, execution_device, prev_module_hook)
    return add_hook_to_module(model, hook, append=True), hook


@contextmanager
def align_module_device(module: nn.Module):
    """Bring the weights of a module, and of the blocks in it, for as long as the context is entered."""
    with ExitStack() as stack:
        for block in module.modules():
            for hook in align_hooks(block):
                stack.callback(hook.release, block)
                with torch.inference_mode(False):  # so that what is changed by hand is noticed
                    hook.pre_forward(block)
        yield


# --- the lesson -------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="tiny", choices=["tiny", "small", "medium"])
    args = parser.parse_args()
    ensure_checkpoint(args.config)
    model = load_plain(args.config)
    expected = run(model)
    total = sum(parameter.nbytes for parameter in model.parameters())
    device_map = infer_auto_device_map(model, {0: total * 3 // 4, "cpu": total})
    dispatch_model(model, device_map)
    with OffloadTrace(model) as happened, torch.inference_mode():
        logits = model(fixed_sequences(model.token_embedding.num_embeddings))  # (2, num_classes)
    for event in happened.events:
        if event.kind == "run" and event.bytes:
            print(f"{event.block}: meta -> {event.device} -> meta bytes={event.bytes}")
    print(f"model_bytes={total}")
    print(f"peak_resident_bytes={happened.peak_resident_bytes}")
    print(f"logits_equal={torch.equal(logits, expected)}")
    print(f"logits_equal_after_undispatch={torch.equal(run(undispatch(model)), expected)}")


if __name__ == "__main__":
    run_script(main)
