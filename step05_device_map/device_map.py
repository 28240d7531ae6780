"""Step 5: decide what goes where, by arithmetic alone.

You learn the bin-packer behind `device_map="auto"`: sizes, blocks, a greedy walk over the devices, and the room
that must stay free so that what is elsewhere can come back to run.
Prints the map for a pretend GPU that holds a part of the model, why each entry is where it is, and what a
forward will cost. No device that is planned for is needed, and no memory for the model.
"""

import argparse
import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from step01_model_def.model_def import CONFIGS, format_bytes, run_script
from step02_checkpoint.build_checkpoint import parse_size
from step03_meta_build.meta_build import build_empty
from step04_to_empty_load.load_with_meta import named_tensors

convert_file_size_to_int = parse_size  # the name that Accelerate gives it

# --- sizes ------------------------------------------------------------------------------------------------


def to_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Read a dtype given as such or as text (`"float16"`, `"torch.float16"`); raises ValueError for others."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype; write one like 'float16' or torch.bfloat16")
    return found


def dtype_byte_size(dtype: torch.dtype | str) -> int:
    """Say how many bytes one number of this dtype takes in memory; bools and sub-byte types take one."""
    return to_dtype(dtype).itemsize


def stored_bytes(name: str, tensor: torch.Tensor, dtype=None, special_dtypes=None) -> int:
    """Count the bytes of a tensor as it will be stored: `dtype` changes floating-point tensors only."""
    if name in (special_dtypes or {}):
        dtype = special_dtypes[name]
    elif dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    return tensor.numel() * dtype_byte_size(dtype)


def named_module_tensors(module: nn.Module, include_buffers: bool = True, recurse: bool = False):
    """List a module's own parameters and buffers by name; with `recurse`, those of its children too."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        yield from module.named_buffers(recurse=recurse)


def compute_module_sizes(
    model: nn.Module, dtype=None, special_dtypes: dict | None = None, buffers_only: bool = False
) -> dict[str, int]:
    """Count the bytes under each dotted prefix, `""` being all; within a prefix, a tied tensor counts once."""
    sizes, seen = {"": 0}, set()
    for name, tensor in named_tensors(model):
        if buffers_only and isinstance(tensor, nn.Parameter):
            continue
        size = stored_bytes(name, tensor, dtype, special_dtypes)
        for prefix in prefixes(name):
            if (prefix, id(tensor)) not in seen:
                seen.add((prefix, id(tensor)))
                sizes[prefix] = sizes.get(prefix, 0) + size
    return sizes


def prefixes(name: str) -> list[str]:
    """List a name and all that it is part of, the most specific first: `a.b` -> `a.b`, `a`, and `""` for all."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def get_max_layer_size(
    modules: list[tuple[str, nn.Module]], module_sizes: dict[str, int], no_split_module_classes: list[str]
) -> tuple[int, list[str]]:
    """Find the largest layer, a block or a module without children: its bytes, and all names of that size."""
    layers = []
    for name, module in modules:
        children = children_of(name, module)
        if children and type(module).__name__ not in no_split_module_classes:
            layers.append(get_max_layer_size(children, module_sizes, no_split_module_classes))
        else:
            layers.append((module_sizes.get(name, 0), [name]))
    largest = max((size for size, _ in layers), default=0)
    return largest, [name for size, names in layers if size == largest for name in names]


# --- blocks and units -------------------------------------------------------------------------------------


def find_blocks(model: nn.Module, no_split_module_classes: list[str] | str | None = None) -> dict[str, nn.Module]:
    """Find the modules that are never split, by name, the outermost of each kind.

    They are those of the classes named by the caller; else of the classes in `_no_split_modules`, which
    Transformers' models bring along; else the items of every `nn.ModuleList`, and PyTorch's own layer whose
    fast path reads all its weights. A block is split only if no device that computes can hold it.
    """
    if isinstance(no_split_module_classes, str):
        no_split_module_classes = [no_split_module_classes]
    classes = no_split_module_classes
    if classes is None:
        classes = {c for m in model.modules() for c in getattr(m, "_no_split_modules", None) or ()}
        classes = classes & {type(m).__name__ for m in model.modules()}
    blocks = {}

    def visit(name, module, parent):
        alike = isinstance(parent, nn.ModuleList) or isinstance(module, nn.TransformerEncoderLayer)
        if type(module).__name__ in classes or (no_split_module_classes is None and not classes and alike):
            blocks[name] = module
        else:
            for child_name, child in children_of(name, module):
                visit(child_name, child, module)

    visit("", model, None)
    return blocks


def children_of(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the children of a module with their full names; one module under two names is listed twice."""
    prefix = f"{name}." if name else ""
    return [(prefix + child, m) for child, m in module._modules.items() if m is not None]


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Map the names of a module's own parameters and buffers to them, without its children's."""
    return {key: tensor for key, tensor in {**module._parameters, **module._buffers}.items() if tensor is not None}


def reads_its_children(module: nn.Module) -> bool:
    """Tell whether a module of PyTorch reads its children's tensors itself, so that it cannot be cut at all."""
    return isinstance(module, nn.MultiheadAttention) or is_parametrized(module)


@dataclass
class Unit:
    """What is planned, brought and dropped whole: a block, a leaf, or what a split module owns itself.

    `keys` are its entries in a device map, `tensors` its tensors by full name; `sizes` has their bytes by
    identity, `buffers` those of the buffers among them. `need` is what the executing device must have free to
    run it: itself, and where it is what a split module owns, the largest of that module's children, too.
    """

    name: str
    keys: list[str]
    tensors: dict[str, torch.Tensor]
    sizes: dict[int, int]
    buffers: dict[int, int]
    need: int


def cut_into_units(model: nn.Module, blocks, dtype=None, special_dtypes=None, buffers_move: bool = True):
    """Cut a model into units; returns them, and for each module that was cut its name, itself and their range.

    `blocks` are the names of the modules with children that stay whole, `buffers_move` tells whether the
    buffers of an offloaded unit are offloaded with it.
    """
    units, cuts = [], []

    def add(name, module, keys, tensors):
        sizes = {id(tensor): stored_bytes(key, tensor, dtype, special_dtypes) for key, tensor in tensors.items()}
        buffers = {id(t): sizes[id(t)] for t in tensors.values() if not isinstance(t, nn.Parameter)}
        need = sum(sizes.values()) - (0 if buffers_move else sum(buffers.values()))
        units.append(Unit(name, keys, tensors, sizes | {id(module): 0}, buffers, need))
        return units[-1]

    def visit(name, module):
        """Add the units of a module; returns the largest `need` among them."""
        children, prefix = children_of(name, module), f"{name}." if name else ""
        if not children or reads_its_children(module) or name in blocks:
            return add(name, module, [name], {prefix + key: tensor for key, tensor in named_tensors(module)}).need
        start = len(units)
        own = {prefix + key: tensor for key, tensor in own_tensors(module).items()}
        own_unit = add(name, module, list(own), own) if own else None
        needs = [visit(*child) for child in children]
        if own_unit is not None:  # it is there for the module's whole forward, beside each child in turn
            own_unit.need += max(needs)
            needs.append(own_unit.need)
        cuts.append((name, module, range(start, len(units))))
        return max(needs)

    visit("", model)
    return units, cuts


# --- budgets ----------------------------------------------------------------------------------------------


def normalize_device(device: int | str | torch.device) -> int | str:
    """Write a device as the maps do: an int for an accelerator (`"cuda:1"` and `"1"` are 1), `"cpu"`, `"disk"`.

    Raises ValueError for anything else.
    """
    text = str(device)
    kind, _, number = text.partition(":")
    if text in ("cpu", "disk", "cpu:0"):
        return kind
    if text.isdecimal() and not isinstance(device, bool):
        return int(text)
    known = kind in ("cuda", "xpu", "mps", "npu", "hpu") or (isinstance(device, torch.device) and kind != "meta")
    if known and (not number or number.isdecimal()):
        return int(number or 0)
    raise ValueError(f"{device!r} is not a device; use 0, 1, ... for accelerators, 'cpu' or 'disk'")


def get_max_memory(max_memory: dict | None = None) -> dict[int | str, int]:
    """Say how many bytes each device may hold, in planning order: accelerators by number, cpu, disk.

    Without an argument: what the machine has free. With one: the caller's table, checked and ordered; keys as
    `normalize_device` takes them, sizes as `parse_size` does. The argument is not changed.
    Raises ValueError that lists everything wrong with the table.
    """
    if max_memory is None:
        return measured_memory()
    table, problems = {}, []
    for key, size in max_memory.items():
        device, bytes_ = attempt(problems, normalize_device, key), attempt(problems, parse_size, size)
        if device in table:
            problems.append(f"device {device!r} stands twice in the table")
        table[device] = bytes_
    if problems:
        raise ValueError("max_memory is wrong: " + "; ".join(problems))
    return {device: table[device] for device in sorted(table, key=device_order)}


def attempt(problems: list[str], function, value, about: str = ""):
    """Call a function; a ValueError goes to the list of problems, so that all of them are found."""
    try:
        return function(value)
    except ValueError as error:
        problems.append(about + str(error))


def device_order(device: int | str) -> tuple:
    """Order devices by preference: accelerators by number, then cpu, then disk."""
    return (("cpu", "disk").index(device) + 1, 0) if isinstance(device, str) else (0, device)


def measured_memory() -> dict[int | str, int]:
    """Measure what is free: each accelerator's memory, and RAM, or less of it where a container sets a limit."""
    ram = min(psutil.virtual_memory().available, container_limit())
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None and kind.type == "mps":
        return {0: ram}  # a Mac's GPU uses the RAM itself: counting it twice would promise too much
    count = torch.accelerator.device_count() if kind is not None else 0
    return {index: torch.accelerator.get_memory_info(index)[0] for index in range(count)} | {"cpu": ram}


def container_limit(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Read how many bytes this process's container may still take (cgroup v2, then v1); without one, infinity."""
    second = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for limit, used in [("memory.max", "memory.current"), second]:
        if (root / limit).is_file() and (root / used).is_file():
            text = (root / limit).read_text().strip()
            return max(0, int(text) - int((root / used).read_text())) if text.isdecimal() else math.inf
    return math.inf


def get_balanced_memory(
    model: nn.Module, max_memory=None, no_split_module_classes=None, dtype=None, special_dtypes=None, low_zero=False
) -> dict[int | str, int]:
    """Lower the accelerators' budgets so that each gets a like share; with `low_zero` the first gets the rest.

    A share is the model divided by the accelerators, and a margin of 1.25 blocks, since blocks are not divided.
    The last accelerator keeps its budget. Devices with a budget of 0 take no part.
    """
    table = get_max_memory(max_memory)
    ids = [device for device, size in table.items() if isinstance(device, int) and size > 0]
    if max_memory is None and len(ids) == 1:
        table[ids[0]] = table[ids[0]] * 9 // 10  # nobody has decided on a margin for activations: leave one
    if len(ids) < 2:
        return table
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    blocks = [sizes.get(name, 0) for name in find_blocks(model, no_split_module_classes)]
    names = {name: module for name, module in model.named_modules() if name and name in sizes}
    leaves = [sizes[n] for n, m in names.items() if not any(child in sizes for child, _ in children_of(n, m))]
    margin = int(1.25 * max([0, *blocks, sum(leaves) // max(len(leaves), 1)]))
    share = sizes[""] // (len(ids) - 1 if low_zero else len(ids)) + margin
    for device in ids[low_zero:-1]:
        table[device] = min(share, table[device])
    if low_zero:
        table[ids[0]] = min(max(0, sizes[""] - sum(table[device] for device in ids[1:])), table[ids[0]])
    return table


# --- the greedy walk --------------------------------------------------------------------------------------


class Packer:
    """Places units on devices and keeps the books: who holds what, and how much must stay free.

    The executing device is the first accelerator that holds anything, or else the cpu. On it there must be
    room for the largest unit that is elsewhere: it comes back to run. The cpu keeps such room too, since what
    is on disk comes through RAM.
    """

    def __init__(self, units: list[Unit], table: dict, headroom: int = 0, buffers_move: bool = True):
        self.units, self.headroom, self.buffers_move = units, headroom, buffers_move
        self.budget = {"disk": math.inf} | table
        self.devices = sorted(self.budget, key=device_order)
        self.used = dict.fromkeys(self.devices, 0)
        self.place_of: dict[int, int | str] = {}
        self.executing: int | str = "cpu"
        self.parked_need, self.parked_buffers = {"cpu": 0, "disk": 0}, {"cpu": 0, "disk": 0}
        self.group_of = self.find_groups()
        self.need_from, self.buffers_from = self.look_ahead()

    def find_groups(self) -> list[list[int]]:
        """Find for each unit the units that share tensors with it, directly or by way of others."""
        owners, group_of = {}, [None] * len(self.units)
        for index, unit in enumerate(self.units):
            for key in unit.sizes:
                owners.setdefault(key, []).append(index)
        for index in range(len(self.units)):
            waiting, group = [index] if group_of[index] is None else [], []
            while waiting:
                member = waiting.pop()
                if group_of[member] is None:
                    group_of[member] = group
                    group.append(member)
                    waiting += [i for key in self.units[member].sizes for i in owners.pop(key, [])]
            group.sort()
        return group_of

    def look_ahead(self) -> tuple[list[int], list[int]]:
        """Sum up, for each position, what is still to come: the largest need, and all bytes of buffers."""
        need, buffers = [0], [0]
        for index in reversed(range(len(self.units))):
            group = self.group_of[index]
            first = group[0] == index  # the others of a tied group are placed with the first
            need.append(max(need[-1], max(self.units[member].need for member in group) if first else 0))
            buffers.append(buffers[-1] + (self.buffer_bytes(group) if first else 0))
        return need[::-1], buffers[::-1]

    def group_bytes(self, group: list[int]) -> int:
        """Count the bytes of tied units: what they share counts once."""
        return sum({key: size for member in group for key, size in self.units[member].sizes.items()}.values())

    def buffer_bytes(self, group: list[int]) -> int:
        """Count the bytes of tied units' buffers."""
        return sum({key: size for member in group for key, size in self.units[member].buffers.items()}.values())

    def reserve(self, device: int | str, after: int) -> int:
        """Say how many bytes must stay free on a device for what may come to it from elsewhere.

        `after` is the position from which on units are still to be placed.
        """
        executes = device != "disk" and device_order(device) <= device_order(self.executing)
        elsewhere = [kind for kind in self.parked_need if kind != device and self.budget.get(kind, 0) > 0]
        if not (executes or device == "cpu"):
            return 0
        room = max([self.need_from[after], *map(self.parked_need.get, elsewhere)]) if elsewhere else 0
        if executes and elsewhere and not self.buffers_move:
            room += self.buffers_from[after] + sum(map(self.parked_buffers.get, elsewhere))
        return room + (self.headroom if executes else 0)

    def free(self, device: int | str) -> float:
        """Say how many bytes of a device's budget nobody has taken."""
        return self.budget[device] - self.used[device]

    def fits(self, device: int | str, group: list[int], after: int) -> bool:
        """Tell whether tied units fit on a device together, with what must stay free there."""
        return self.group_bytes(group) + self.reserve(device, after) <= self.free(device)

    def place(self, group: list[int], device: int | str) -> None:
        """Put tied units on a device, together."""
        size = self.group_bytes(group)
        self.used[device] += size
        self.place_of.update(dict.fromkeys(group, device))
        if isinstance(device, str):
            self.parked_need[device] = max(self.parked_need[device], *(self.units[i].need for i in group))
            self.parked_buffers[device] += self.buffer_bytes(group)
        elif size:
            self.executing = min(device, self.executing, key=device_order)

    def walk(self, fallback: bool = False, say=lambda text: None) -> list[int]:
        """Place all units: in order, each on the first device that takes it, never back to an earlier one.

        Only what the last device refuses may still go to an earlier one. With `fallback`, a device that would
        stay empty gets the first later unit that fits. Returns the units that nothing can hold.
        """
        homeless, current = [], 0
        for index in range(len(self.units)):
            group = self.group_of[index]
            if group[0] != index or index in self.place_of:
                continue
            while current < len(self.devices) - 1 and not self.fits(self.devices[current], group, index + 1):
                device = self.devices[current]
                say(f"{self.name(index)}: {self.why_not(device, index)}")
                later = self.first_that_fits(device, index) if fallback and not self.used[device] else None
                if later is None:
                    current += 1
                else:
                    say(f"{self.name(later[0])}: on {device}, which would stay empty")
                    self.place(later, device)
            devices = [self.devices[current], *self.devices]
            device = next((d for d in devices if self.fits(d, group, index + 1)), None)
            if device is None:
                homeless += group
            else:
                say(f"{self.name(index)}: on {device}")
                self.place(group, device)
        return homeless

    def first_that_fits(self, device: int | str, start: int) -> list[int] | None:
        """Find the first unplaced units from `start` on that fit on a device, and weigh anything."""
        waiting = (self.group_of[i] for i in range(start, len(self.units)) if i not in self.place_of)
        return next((g for g in waiting if self.group_bytes(g) and self.fits(device, g, start)), None)

    def why_not(self, device: int | str, index: int) -> str:
        """Say in numbers why units are not on a device."""
        size, room, free = self.group_bytes(self.group_of[index]), self.reserve(device, index + 1), self.free(device)
        verdict = "do not fit" if size + room > free else "would fit, but the walk never goes back"
        return f"{device} has {free} B free; {size} B + {room} B reserved {verdict}"

    def name(self, index: int) -> str:
        """Name a unit for people."""
        return ", ".join(self.units[index].keys) or "the model"


# --- the map ----------------------------------------------------------------------------------------------


def infer_auto_device_map(
    model: nn.Module, max_memory: dict | None = None, no_split_module_classes: list[str] | str | None = None,
    dtype: torch.dtype | str | None = None, special_dtypes: dict | None = None, verbose: bool = False,
    clean_result: bool = True, offload_buffers: bool = False, fallback_allocation: bool = False,
    headroom: int | str = 0,
) -> dict[str, int | str]:  # fmt: skip
    """Plan on which device each part of a model lives: dotted name -> 0, 1, ..., "cpu" or "disk".

    Sizes are in bytes, of `dtype` if given. `headroom` keeps bytes free on the executing device for
    activations. Without `offload_buffers`, the buffers of offloaded units stay on the executing device, and
    count there. The plan is made by `Packer`; the name, the arguments and the idea are Accelerate's.
    Raises ValueError when no device can hold a part. Warns when a part cannot run within the budgets, and
    when a module that may add up what its children give is cut between two devices that compute.
    """
    table, room = get_max_memory(max_memory), parse_size(headroom)
    sizes, blocks = compute_module_sizes(model, dtype, special_dtypes), find_blocks(model, no_split_module_classes)
    limit = max([max(0, size - room) for device, size in table.items() if device != "disk"], default=math.inf)
    too_large = [name for name in blocks if sizes.get(name, 0) > limit]
    if too_large:
        why = f"no device that computes has more than {limit} B, and it takes {sizes[too_large[0]]} B"
        warn(f"{shorten(too_large)}: {why}. It is split, and its forward may not survive that")
    units, cuts = cut_into_units(model, blocks.keys() - set(too_large), dtype, special_dtypes, offload_buffers)
    packer = Packer(units, table, room, offload_buffers)
    homeless = packer.walk(fallback_allocation, say=print if verbose else lambda text: None)
    if homeless:
        raise ValueError(nothing_holds(packer, homeless))
    warn_of_cut_modules(cuts, packer)
    warn_of_shortage(packer)
    device_map = {key: packer.place_of[i] for i, unit in enumerate(units) for key in unit.keys}
    return merge_entries(device_map, apart=too_large) if clean_result else device_map


def warn(text: str) -> None:
    """Warn whoever asked for the plan."""
    warnings.warn(text, stacklevel=4)


def shorten(names: list[str]) -> str:
    """List names for people: the first few, and how many more."""
    return ", ".join(name or "the model" for name in names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")


def warn_of_shortage(packer: Packer) -> None:
    """Warn when the executing device has no room for the largest part that must come to it."""
    main = packer.executing
    peak = forecast(packer)[f"peak_bytes_{main}"] + packer.headroom
    if peak > packer.budget.get(main, math.inf):
        elsewhere = [i for i, place in packer.place_of.items() if place != main]
        largest = packer.name(max(elsewhere, key=lambda i: packer.units[i].need))
        over = f"with {largest} on it, {main} holds {peak} B, and its budget is {packer.budget[main]} B"
        warn(f"the plan cannot run within the budgets: {over}")


def nothing_holds(packer: Packer, homeless: list[int]) -> str:
    """Write the error for units that no device can hold: how many bytes are missing, and where."""
    text = f"{packer.group_bytes(homeless)} B have no place: {shorten([packer.name(i) for i in homeless])}. "
    for device, budget in packer.budget.items():
        text += f"{device}: {packer.free(device)} B free of {budget} B, {packer.reserve(device, 0)} B reserved. "
    return text + "Raise a budget, or leave 'disk' out of max_memory, which then has no limit"


def warn_of_cut_modules(cuts: list, packer: Packer) -> None:
    """Warn of each module that was cut between two devices that compute, where that may break its forward.

    A block like `y = x + f(x)` adds a tensor on one device to a tensor on another. Containers do not compute,
    and a module that holds a list of blocks is made to be cut between them.
    """
    for name, module, members in cuts:
        places = {packer.place_of[member] for member in members}
        devices = sorted({p if isinstance(p, int) else packer.executing for p in places}, key=device_order)
        made_for_it = any(isinstance(child, nn.ModuleList) for child in module.modules())
        if len(devices) > 1 and not made_for_it and not isinstance(module, nn.Sequential | nn.ModuleDict):
            mend = "if its forward adds its input to what they give, name its class in no_split_module_classes"
            warn(f"{name or 'the model'} ({type(module).__name__}) is cut between devices {devices}: {mend}")


def clean_device_map(device_map: dict[str, int | str], module_name: str = "") -> dict[str, int | str]:
    """Merge entries at or below `module_name` that have a common parent and one device; returns a new map."""
    inside = {key: device for key, device in device_map.items() if not module_name or module_name in prefixes(key)}
    outside = {key: device for key, device in device_map.items() if key not in inside}
    return outside | merge_entries(inside, apart=[module_name.rpartition(".")[0]] if module_name else [])


def merge_entries(device_map: dict[str, int | str], apart: list[str] = ()) -> dict[str, int | str]:
    """Merge entries of one device to their common parent, unless a module of `apart` would be made whole by it."""
    devices, counts = {}, Counter(prefix for key in device_map for prefix in prefixes(key))
    for key, device in device_map.items():
        for prefix in prefixes(key):
            devices.setdefault(prefix, set()).add(device)
    kept_apart = {prefix for name in apart for prefix in prefixes(name)}
    merged = {}
    for key, device in device_map.items():
        ways = [p for p in prefixes(key) if len(devices[p]) == 1 and counts[p] > 1 and p not in kept_apart]
        merged[ways[-1] if ways else key] = device
    return merged


def resolve_device_map(model: nn.Module, device_map: dict) -> dict[str, int | str]:
    """Say for every tensor, by full name, on which device it is; the most specific entry decides.

    Raises ValueError that lists every fault: entries that name nothing, things that are no device, tensors
    without a device, a module whose own tensors are on several.
    """
    if not isinstance(device_map, Mapping):
        raise ValueError(f"a device map is a dict, not {device_map!r}; plan_device_map(model, 'auto') makes one")
    names, problems, devices, of_module = [name for name, _ in named_tensors(model)], [], {}, {}
    known = {*names, *(name for name, _ in model.named_modules(remove_duplicate=False))}
    for key, device in device_map.items():
        devices[key] = attempt(problems, normalize_device, device, f"{key}: ")
        if key not in known:
            problems.append(f"{key!r} names nothing in the model")
    for name in names:
        key = next((prefix for prefix in prefixes(name) if prefix in devices), None)
        if key is None:
            problems.append(f"{name} has no device")
        of_module.setdefault(name.rpartition(".")[0], {})[name] = devices.get(key)
    for owner, own in of_module.items():
        if len(set(own.values())) > 1:
            problems.append(f"what {owner or 'the model'} owns itself must be on one device: {own}")
    if problems:
        raise ValueError("the device map is wrong: " + "; ".join(problems))
    return {name: device for own in of_module.values() for name, device in own.items()}


def check_device_map(model: nn.Module, device_map: dict) -> None:
    """Raise ValueError with all faults, unless the map gives every tensor of the model one device."""
    resolve_device_map(model, device_map)


def override_device_map(model: nn.Module, device_map: dict, changes: dict) -> dict[str, int | str]:
    """Change single entries of a map, merged as it may be; returns a new map, checked and merged again.

    `changes` is like `{"encoder.layers.2": "disk"}`; it decides about all that is in what it names.
    """
    kept = {key: device for key, device in device_map.items() if not changes.keys() & set(prefixes(key))}
    resolved = resolve_device_map(model, kept | changes)
    return merge_entries({name.rpartition(".")[0]: device for name, device in resolved.items()})


def plan_device_map(
    model: nn.Module, strategy: str = "auto", max_memory: dict | None = None, headroom: int | str = 0, **options
) -> tuple[dict[str, int | str], dict[int | str, int]]:
    """Plan by a strategy; returns the map and the budgets that it kept.

    `"sequential"` fills each accelerator before the next; `"balanced"`, which is `"auto"`, gives each a like
    share; `"balanced_low_0"` leaves room on the first. `options` go to `infer_auto_device_map`.
    """
    strategies = ("auto", "balanced", "balanced_low_0", "sequential")
    if strategy not in strategies:
        raise ValueError(f"strategy {strategy!r} is unknown; choose one of {', '.join(strategies)}")
    if strategy == "sequential":
        table = get_max_memory(max_memory)
    else:
        about_sizes = {key: options.get(key) for key in ("no_split_module_classes", "dtype", "special_dtypes")}
        table = get_balanced_memory(model, max_memory, **about_sizes, low_zero=strategy == "balanced_low_0")
    return infer_auto_device_map(model, table, headroom=headroom, **options), table


# --- what a plan costs, and why it is so ------------------------------------------------------------------


def blocks_under(model: nn.Module, device_map: dict, no_split_module_classes=None) -> set[str]:
    """Name the blocks that stay whole under a map: those that no entry cuts."""
    cut = {prefix for key in device_map for prefix in prefixes(key)[1:]}
    return find_blocks(model, no_split_module_classes).keys() - cut


def replay(
    model, device_map, max_memory=None, no_split_module_classes=None, dtype=None, special_dtypes=None,
    offload_buffers=False, headroom=0,
) -> tuple[Packer, dict[int, str], dict[int, str]]:  # fmt: skip
    """Place a model's units as a finished map says; returns the books, and why units are there, devices empty."""
    resolved, blocks = resolve_device_map(model, device_map), blocks_under(model, device_map, no_split_module_classes)
    units, _ = cut_into_units(model, blocks, dtype, special_dtypes, offload_buffers)
    units = [unit for unit in units if unit.tensors]
    table = {device: 0 for device in resolved.values() if device != "disk"} | get_max_memory(max_memory)
    packer, why, why_empty = Packer(units, table, parse_size(headroom), offload_buffers), {}, {}
    place = [resolved[next(iter(unit.tensors))] for unit in units]
    packer.executing = min([d for d in place if isinstance(d, int)], default="cpu")
    empty = [device for device in packer.devices if isinstance(device, int) and device not in set(place)]
    for index, device in enumerate(place):
        before = [d for d in packer.devices if device_order(d) < device_order(device)]
        why[index] = packer.why_not(before[-1], index) if before else "it is the first device"
        for device_before in [d for d in empty if d in before and d not in why_empty]:
            why_empty[device_before] = f"{packer.name(index)}: {packer.why_not(device_before, index)}"
        group = [i for i in packer.group_of[index] if place[i] == device and i not in packer.place_of]
        if group:
            packer.place(group, device)
    return packer, why, why_empty


def forecast(packer: Packer) -> dict[str, int]:
    """Compute from the books what a forward moves, and the peak bytes on each device, without and with prefetch.

    Prefetching brings the next unit while one runs, so that two of them are there beside the resident ones.
    """
    main = packer.executing
    away = [i for i, place in packer.place_of.items() if isinstance(place, str) and place != main]
    kept = 0 if packer.buffers_move else packer.buffer_bytes(away)
    needs = [0, 0, *sorted(packer.units[i].need for i in away)]
    held = packer.used.get(main, 0) + kept
    costs = {"moved_bytes_per_forward": sum(packer.group_bytes([i]) for i in away)}
    if not packer.buffers_move:
        costs["moved_bytes_per_forward"] -= sum(packer.buffer_bytes([i]) for i in away)
    costs |= {f"peak_bytes_{main}": held + needs[-1], f"peak_bytes_{main}_with_prefetch": held + needs[-1] + needs[-2]}
    others = [device for device in packer.devices if device not in (main, "disk") and packer.used[device]]
    return costs | {f"peak_bytes_{device}": packer.used[device] for device in others}


def explain_device_map(model: nn.Module, device_map: dict, max_memory: dict | None = None, **options) -> str:
    """Explain a map: each device's bytes, each unit's bytes and why it is there, and the forecast.

    `options` are those of the plan: `no_split_module_classes`, `dtype`, `special_dtypes`, `offload_buffers`,
    `headroom`. All sizes are in bytes.
    """
    packer, why, why_empty = replay(model, device_map, max_memory, **options)
    lines = ["device budget used reserved free"]
    for device in packer.devices:
        reserved = packer.reserve(device, len(packer.units)) if packer.used[device] else 0
        free = packer.free(device) - reserved
        lines.append(f"{device} {packer.budget[device]} {packer.used[device]} {reserved} {free}")
        if isinstance(device, int) and not packer.used[device]:
            lines[-1] += f" (empty: {why_empty.get(device, 'everything is on the devices before it')})"
    lines.append("part device bytes why not on the device before")
    for index, device in packer.place_of.items():
        lines.append(f"{packer.name(index)} {device} {packer.group_bytes([index])} ({why[index]})")
    if packer.headroom:
        lines.append(f"headroom={packer.headroom}")
    return "\n".join([*lines, *(f"{name}={count}" for name, count in forecast(packer).items())])


def parse_pairs(pairs: list[str]) -> dict[str, str]:
    """Read options like `0=24GiB cpu=64GiB`; raises ValueError for one that is no pair, or stands twice."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise ValueError(f"write {', '.join(wrong)} as a pair, like cpu=64GiB or encoder.layers.2=disk")
    table = dict(pair.split("=", 1) for pair in pairs)
    if len(table) < len(pairs):
        raise ValueError(f"a name stands twice in {' '.join(pairs)}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="tiny", choices=CONFIGS)
    parser.add_argument("--max-memory", nargs="+", metavar="DEVICE=SIZE", help="like 0=24GiB 1=24GiB cpu=64GiB")
    parser.add_argument("--strategy", default="auto", help="auto, balanced, balanced_low_0 or sequential")
    parser.add_argument("--dtype", help="the dtype that the weights will have, like float16")
    parser.add_argument("--headroom", default="0", help="bytes to keep free for activations, like 1GiB")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=DEVICE", help="like encoder.layers.2=disk")
    args = parser.parse_args()
    model = build_empty(args.config)
    total = compute_module_sizes(model, args.dtype)[""]
    default = {0: total * 3 // 4, "cpu": total * 3 // 4}  # of `tiny`, one block each beside room for another
    max_memory = parse_pairs(args.max_memory) if args.max_memory else default
    device_map, table = plan_device_map(model, args.strategy, max_memory, args.headroom, dtype=args.dtype)
    if args.set:
        device_map = override_device_map(model, device_map, parse_pairs(args.set))
    print("note=planning is arithmetic: none of the devices needs to exist")
    print(f"config={args.config}")
    print(f"model_bytes={total} ({format_bytes(total)})")
    for name, device in device_map.items():
        print(f"device_map[{name!r}]={device}")
    print(explain_device_map(model, device_map, table, dtype=args.dtype, headroom=args.headroom))


if __name__ == "__main__":
    run_script(main)
