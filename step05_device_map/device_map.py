"""Step 5: decide what goes where, by arithmetic alone.

You learn the bin-packer behind `device_map="auto"`: sizes, blocks, a greedy walk over the devices, and the room
that must stay free so that what is elsewhere can come back to run.
Prints the map for a pretend GPU that holds a part of the model, why each entry is where it is, and what a
forward will cost. No device that is planned for is needed, and no memory for the model.
"""

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from warnings import warn

try:
    from step01_model_def.model_def import CONFIGS, format_bytes, raise_all, run_script
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

import psutil
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

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
    usual = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    return tensor.numel() * dtype_byte_size((special_dtypes or {}).get(name, usual))


def named_module_tensors(module: nn.Module, include_buffers: bool = True, recurse: bool = False):
    """List a module's own parameters and buffers by name; with `recurse`, those of its children too."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        yield from module.named_buffers(recurse=recurse)


def compute_module_sizes(
    model: nn.Module, dtype=None, special_dtypes: dict | None = None, buffers_only: bool = False
) -> dict[str, int]:
    """Count the bytes under each dotted prefix, `""` being all; within a prefix, a tied tensor counts once."""
    sizes = {"": {}}
    for name, tensor in named_tensors(model):
        if not (buffers_only and isinstance(tensor, nn.Parameter)):
            for prefix in prefixes(name):
                sizes.setdefault(prefix, {}).setdefault(id(tensor), stored_bytes(name, tensor, dtype, special_dtypes))
    return {prefix: sum(by_identity.values()) for prefix, by_identity in sizes.items()}


def prefixes(name: str) -> list[str]:
    """List a name and all that it is part of, the most specific first: `a.b` -> `a.b`, `a`, and `""` for all."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def get_max_layer_size(
    modules: list[tuple[str, nn.Module]], module_sizes: dict[str, int], no_split_module_classes: list[str]
) -> tuple[int, list[str]]:
    """Find the largest layer, a block or a module without children: its bytes, and all names of that size."""

    def whole(module):
        return type(module).__name__ in no_split_module_classes or not list(module.children())

    sizes = {name: module_sizes.get(name, 0) for module in modules for name in outermost(*module, whole)}
    largest = max(sizes.values(), default=0)
    return largest, [name for name, size in sizes.items() if size == largest]


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
    if classes or no_split_module_classes is not None:
        return outermost("", model, lambda module: type(module).__name__ in classes)
    items = {item for m in model.modules() if isinstance(m, nn.ModuleList) for item in m}
    return outermost("", model, lambda module: module in items or isinstance(module, nn.TransformerEncoderLayer))


def outermost(name: str, module: nn.Module, wanted) -> dict[str, nn.Module]:
    """Find the modules for which `wanted` is true, by full name, but none inside another."""
    if wanted(module):
        return {name: module}
    return {n: m for child in children_of(name, module) for n, m in outermost(*child, wanted).items()}


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
    identity, `stays` those of the buffers that are on the executing device wherever the unit is. `need` is what
    that device must have free to run it: all that moves, and where it is what a split module owns, the largest
    of that module's children, too.
    """

    name: str
    keys: list[str]
    tensors: dict[str, torch.Tensor]
    sizes: dict[int, int]
    stays: dict[int, int]
    need: int

    def __str__(self) -> str:
        return ", ".join(self.keys) or "the model"


class Group:
    """Units that are placed together, since they share tensors, directly or by way of others; mostly one alone."""

    def __init__(self, units: list[Unit]):
        self.units, self.need = units, max(unit.need for unit in units)
        self.size, self.stays = total(unit.sizes for unit in units), total(unit.stays for unit in units)


def total(tables) -> int:
    """Sum up tables of bytes by identity: what stands in several of them counts once."""
    return sum({key: size for table in tables for key, size in table.items()}.values())


def find_groups(units: list[Unit], homes: dict | None = None) -> list[Group]:
    """Group units in the order of the first of each; where they have `homes`, only those with the same home."""
    group_of, owner = [[index] for index in range(len(units))], {}
    for index, unit in enumerate(units):
        for key in unit.sizes:
            other = owner.setdefault((key, homes and homes[unit.name]), index)
            small, large = sorted((group_of[index], group_of[other]), key=len)
            if small is not large:
                large += small
                for member in small:
                    group_of[member] = large
    return [Group([units[i] for i in sorted(group)]) for group in {id(g): g for g in group_of}.values()]


def cut_into_units(model: nn.Module, blocks, dtype=None, special_dtypes=None, buffers_move: bool = True):
    """Cut a model into units; returns them, and for each module that was cut its name, itself and its units.

    `blocks` are the names of the modules with children that stay whole, `buffers_move` tells whether the
    buffers of an offloaded unit are offloaded with it.
    """
    units, cuts = [], []

    def add(name, module, keys, tensors):
        sizes = {id(tensor): stored_bytes(key, tensor, dtype, special_dtypes) for key, tensor in tensors.items()}
        stays = {id(t): sizes[id(t)] for t in tensors.values() if not (buffers_move or isinstance(t, nn.Parameter))}
        need = sum(sizes.values()) - sum(stays.values())
        units.append(Unit(name, keys, tensors, sizes | {id(module): 0}, stays, need))

    def visit(name, module):
        children, prefix = children_of(name, module), f"{name}." if name else ""
        if not children or reads_its_children(module) or name in blocks:
            return add(name, module, [name], {prefix + key: tensor for key, tensor in named_tensors(module)})
        start, own = len(units), {prefix + key: tensor for key, tensor in own_tensors(module).items()}
        if own:
            add(name, module, list(own), own)
        for child in children:
            visit(*child)
        if own:  # it is there for the module's whole forward, beside each child in turn
            units[start].need += max(unit.need for unit in units[start + 1 :])
        cuts.append((name, module, units[start:]))

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
    if text.isdecimal():
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
    raise_all(problems, "max_memory is wrong: ")
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


def accelerators() -> list[torch.device]:
    """List the accelerators of this machine."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())] if kind else []


def measured_memory() -> dict[int | str, int]:
    """Measure what is free: each accelerator's memory, and RAM, or less of it where a container sets a limit."""
    ram = min(psutil.virtual_memory().available, container_limit())
    if any(device.type == "mps" for device in accelerators()):
        return {0: ram}  # a Mac's GPU uses the RAM itself: counting it twice would promise too much
    return {d.index: torch.accelerator.get_memory_info(d)[0] for d in accelerators()} | {"cpu": ram}


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
    """Places groups of units on devices and keeps the books: who holds what, and how much must stay free.

    The executing device is the first accelerator that holds anything, or else the cpu. On it there must be
    room for the largest unit that is elsewhere: it comes back to run. The cpu keeps such room too, since what
    is on disk comes through RAM.
    """

    def __init__(self, units: list[Unit], table: dict, headroom: int = 0, homes: dict | None = None):
        self.units, self.groups, self.headroom = units, find_groups(units, homes), headroom
        self.budget = {"disk": math.inf} | table
        self.devices = sorted(self.budget, key=device_order)
        self.used = dict.fromkeys(self.devices, 0)
        self.place_of: dict[str, int | str] = {}
        self.executing: int | str = "cpu"
        self.parked_need, self.parked_stays = {"cpu": 0, "disk": 0}, {"cpu": 0, "disk": 0}
        # what is still to come from each position on: the largest need, and all bytes that stay
        self.need_from = [*accumulate((g.need for g in reversed(self.groups)), max, initial=0)][::-1]
        self.stays_from = [*accumulate((g.stays for g in reversed(self.groups)), initial=0)][::-1]

    def reserve(self, device: int | str, after: int) -> int:
        """Say how many bytes must stay free on a device for what may come to it from elsewhere.

        `after` is the position from which on groups are still to be placed.
        """
        executes = device_order(device) <= device_order(self.executing)
        elsewhere = [kind for kind in self.parked_need if kind != device and self.budget.get(kind, 0) > 0]
        room = self.headroom if executes else 0
        if elsewhere and (executes or device == "cpu"):
            room += max(self.need_from[after], *(self.parked_need[kind] for kind in elsewhere))
        if elsewhere and executes:
            room += self.stays_from[after] + sum(self.parked_stays[kind] for kind in elsewhere)
        return room

    def free(self, device: int | str) -> float:
        """Say how many bytes of a device's budget nobody has taken."""
        return self.budget[device] - self.used[device]

    def fits(self, device: int | str, group: Group, after: int) -> bool:
        """Tell whether a group fits on a device, with what must stay free there."""
        return group.size + self.reserve(device, after) <= self.free(device)

    def place(self, group: Group, device: int | str) -> None:
        """Put a group on a device."""
        self.used[device] += group.size
        self.place_of.update({unit.name: device for unit in group.units})
        if isinstance(device, str):
            self.parked_need[device] = max(self.parked_need[device], group.need)
            self.parked_stays[device] += group.stays
        elif group.size:
            self.executing = min(device, self.executing, key=device_order)

    def walk(self, fallback: bool = False, say=lambda text: None) -> list[Unit]:
        """Place all groups: in order, each on the first device that takes it, never back to an earlier one.

        Only what the last device refuses may still go to an earlier one. With `fallback`, a device that would
        stay empty gets the first later group that fits. Returns the units that nothing can hold.
        """
        homeless, current = [], 0
        for index, group in enumerate(self.groups):
            if group.units[0].name in self.place_of:
                continue
            while current < len(self.devices) - 1 and not self.fits(self.devices[current], group, index + 1):
                device = self.devices[current]
                say(f"{group.units[0]}: {self.why_not(device, index)}")
                later = self.first_that_fits(device, index) if fallback and not self.used[device] else None
                if later is None:
                    current += 1
                else:
                    say(f"{later.units[0]}: on {device}, which would stay empty")
                    self.place(later, device)
            devices = [self.devices[current], *self.devices]
            device = next((d for d in devices if self.fits(d, group, index + 1)), None)
            if device is None:
                homeless += group.units
            else:
                say(f"{group.units[0]}: on {device}")
                self.place(group, device)
        return homeless

    def spread_out(self) -> None:
        """Let offloaded parts change places with equal ones that are resident, until they stand evenly among them.

        Those that follow each other must be brought one after the other; behind one that stays there is time.
        """
        alike = defaultdict(list)
        for group in self.groups:
            if self.place_of[group.units[0].name] in (self.executing, "cpu", "disk"):
                alike[group.size, group.need, group.stays].append(group)
        for groups in alike.values():
            places = [self.place_of[group.units[0].name] for group in groups]
            away = [place for place in places if place != self.executing]
            slots = {(2 * i + 1) * len(groups) // (2 * len(away)): place for i, place in enumerate(away)}
            for i, group in enumerate(groups):
                self.place_of.update(dict.fromkeys((u.name for u in group.units), slots.get(i, self.executing)))

    def first_that_fits(self, device: int | str, start: int) -> Group | None:
        """Find the first unplaced group from `start` on that fits on a device, and weighs anything."""
        waiting = (group for group in self.groups[start:] if group.size and group.units[0].name not in self.place_of)
        return next((group for group in waiting if self.fits(device, group, start)), None)

    def why_not(self, device: int | str, index: int) -> str:
        """Say in numbers why a group is not on a device."""
        size, room, free = self.groups[index].size, self.reserve(device, index + 1), self.free(device)
        verdict = "do not fit" if size + room > free else "would fit, but the walk never goes back"
        return f"{device} has {free} B free; {size} B + {room} B reserved {verdict}"

    def away(self) -> list[Unit]:
        """List the units that come to the executing device to run: they are in RAM or on disk."""
        places = {"cpu", "disk"} - {self.executing}
        return [unit for unit in self.units if self.place_of.get(unit.name) in places]


# --- the map ----------------------------------------------------------------------------------------------


def infer_auto_device_map(
    model: nn.Module, max_memory: dict | None = None, no_split_module_classes: list[str] | str | None = None,
    dtype: torch.dtype | str | None = None, special_dtypes: dict | None = None, verbose: bool = False,
    clean_result: bool = True, offload_buffers: bool = False, fallback_allocation: bool = False,
    headroom: int | str = 0, spread: bool = False,
) -> dict[str, int | str]:  # fmt: skip
    """Plan on which device each part of a model lives: dotted name -> 0, 1, ..., "cpu" or "disk".

    Sizes are in bytes, of `dtype` if given. `headroom` keeps bytes free on the executing device for
    activations. Without `offload_buffers`, the buffers of offloaded units stay on the executing device, and
    count there. With `spread`, offloaded parts stand among the resident ones. The plan is made by `Packer`; the name,
    the other arguments and the idea are Accelerate's.
    Raises ValueError when no device can hold a part. Warns when a part cannot run within the budgets, and
    when a module that may add up what its children give is cut between two devices that compute.
    """
    table, room = get_max_memory(max_memory), parse_size(headroom)
    sizes, blocks = compute_module_sizes(model, dtype, special_dtypes), find_blocks(model, no_split_module_classes)
    limit = max([max(0, size - room) for device, size in table.items() if device != "disk"], default=math.inf)
    too_large = [name for name in blocks if sizes.get(name, 0) > limit]
    if too_large:
        why = f"no device that computes has more than {limit} B, and it takes {sizes[too_large[0]]} B"
        warn(f"{shorten(too_large)}: {why}. It is split, and its forward may not survive that", stacklevel=2)
    units, cuts = cut_into_units(model, blocks.keys() - set(too_large), dtype, special_dtypes, offload_buffers)
    packer = Packer(units, table, room)
    homeless = packer.walk(fallback_allocation, say=print if verbose else lambda text: None)
    if homeless:
        raise ValueError(nothing_holds(packer, homeless))
    if spread:
        packer.spread_out()
    warn_of_cut_modules(cuts, packer)
    warn_of_shortage(packer)
    device_map = {key: packer.place_of[unit.name] for unit in units for key in unit.keys}
    return merge_entries(device_map, apart=too_large) if clean_result else device_map


def shorten(names: list[str]) -> str:
    """List names for people: the first few, and how many more."""
    return ", ".join(name or "the model" for name in names[:5]) + (f" and {len(names) - 5} more" if names[5:] else "")


def warn_of_shortage(packer: Packer) -> None:
    """Warn when the executing device has no room for the largest part that must come to it."""
    main = packer.executing
    peak = forecast(packer)[f"peak_bytes_{main}"] + packer.headroom
    if peak > packer.budget.get(main, math.inf):
        largest = max(packer.away(), key=lambda unit: unit.need)
        over = f"with {largest} on it, {main} holds {peak} B, and its budget is {packer.budget[main]} B"
        warn(f"the plan cannot run within the budgets: {over}", stacklevel=3)


def nothing_holds(packer: Packer, homeless: list[Unit]) -> str:
    """Write the error for units that no device can hold: how many bytes are missing, and where."""
    text = f"{total(unit.sizes for unit in homeless)} B have no place: {shorten([*map(str, homeless)])}. "
    for device, budget in packer.budget.items():
        text += f"{device}: {packer.free(device)} B free of {budget} B, {packer.reserve(device, 0)} B reserved. "
    return text + "Raise a budget, or leave 'disk' out of max_memory, which then has no limit"


def warn_of_cut_modules(cuts: list, packer: Packer) -> None:
    """Warn of each module that was cut between two devices that compute, where that may break its forward.

    A block like `y = x + f(x)` adds a tensor on one device to a tensor on another. Containers do not compute,
    and a module that holds a list of blocks is made to be cut between them.
    """
    for name, module, members in cuts:
        places = {packer.place_of[unit.name] for unit in members}
        devices = sorted({p if isinstance(p, int) else packer.executing for p in places}, key=device_order)
        made_for_it = any(isinstance(child, nn.ModuleList) for child in module.modules())
        if len(devices) > 1 and not made_for_it and not isinstance(module, nn.Sequential | nn.ModuleDict):
            what = f"{name or 'the model'} ({type(module).__name__})"
            mend = "if its forward adds its input to what they give, name its class in no_split_module_classes"
            warn(f"{what} is cut between devices {devices}: {mend}", stacklevel=3)


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
    known = {name for name, _ in [*named_tensors(model), *model.named_modules(remove_duplicate=False)]}
    problems = [f"{key!r} names nothing in the model" for key in device_map if key not in known]
    devices = {key: attempt(problems, normalize_device, device, f"{key}: ") for key, device in device_map.items()}
    of_module = {}
    for name, _ in named_tensors(model):
        key = next((prefix for prefix in prefixes(name) if prefix in devices), None)
        if key is None:
            problems.append(f"{name} has no device")
        of_module.setdefault(name.rpartition(".")[0], {})[name] = devices.get(key)
    mixed = {owner or "the model": own for owner, own in of_module.items() if len(set(own.values())) > 1}
    problems += [f"what {owner} owns itself must be on one device: {own}" for owner, own in mixed.items()]
    raise_all(problems, "the device map is wrong: ")
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
) -> tuple[Packer, dict[str, str], dict[int, str]]:  # fmt: skip
    """Place a model's units as a finished map says; returns the books, and why units are there, devices empty."""
    resolved, blocks = resolve_device_map(model, device_map), blocks_under(model, device_map, no_split_module_classes)
    units = [u for u in cut_into_units(model, blocks, dtype, special_dtypes, offload_buffers)[0] if u.tensors]
    table = {device: 0 for device in resolved.values() if device != "disk"} | get_max_memory(max_memory)
    homes = {unit.name: resolved[next(iter(unit.tensors))] for unit in units}
    packer, why, why_empty = Packer(units, table, parse_size(headroom), homes), {}, {}
    packer.executing = min([d for d in homes.values() if isinstance(d, int)], default="cpu")
    for index, group in enumerate(packer.groups):
        device = homes[group.units[0].name]
        before = packer.devices[: packer.devices.index(device)]
        reason = packer.why_not(before[-1], index) if before else "it is the first device"
        why.update({unit.name: reason for unit in group.units})
        for empty in {*before} - {*homes.values(), *why_empty, "cpu"}:
            why_empty[empty] = f"{group.units[0]}: {packer.why_not(empty, index)}"
        packer.place(group, device)
    return packer, why, why_empty


def forecast(packer: Packer) -> dict[str, int]:
    """Compute from the books what a forward moves, and the peak bytes on each device, without and with prefetch.

    Prefetching brings the next unit while one runs, so that two of them are there beside the resident ones.
    """
    main, away = packer.executing, packer.away()
    needs = [0, 0, *sorted(unit.need for unit in away)]
    peak = packer.used.get(main, 0) + total(unit.stays for unit in away) + needs[-1]
    moved = sum(sum(unit.sizes.values()) - sum(unit.stays.values()) for unit in away)
    costs = {"moved_bytes_per_forward": moved, f"peak_bytes_{main}": peak}
    costs[f"peak_bytes_{main}_with_prefetch"] = peak + needs[-2]
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
        reserved = packer.reserve(device, len(packer.groups)) if packer.used[device] else 0
        free = packer.free(device) - reserved
        lines.append(f"{device} {packer.budget[device]} {packer.used[device]} {reserved} {free}")
        if isinstance(device, int) and not packer.used[device]:
            lines[-1] += f" (empty: {why_empty.get(device, 'everything is on the devices before it')})"
    lines.append("part device bytes why not on the device before")
    for unit in [unit for group in packer.groups for unit in group.units]:
        lines.append(f"{unit} {packer.place_of[unit.name]} {sum(unit.sizes.values())} ({why[unit.name]})")
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
