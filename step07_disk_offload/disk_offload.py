"""Step 7: load and run a model that does not fit, straight from its checkpoint.

You learn lazy reading: a safetensors file says which bytes hold which tensor, so that a weight on disk is read
where it lies, when its block runs, and let go after it.
Loads the shards of step 2 under budgets that force all three tiers (device, RAM, disk), prints the map, each
block's way, the peak, and that the logits are those of step 4. Reads the checkpoint of step 2.
"""

import argparse
import functools
import hashlib
import json
import os
import threading
from collections import ChainMap, namedtuple
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    from step01_model_def.model_def import fixed_sequences, format_bytes, raise_all, run_script
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

import torch
from torch import nn
from tqdm import tqdm

from step02_checkpoint.build_checkpoint import (
    ALIGNMENT, ARTIFACTS, DTYPES, INDEX_NAME, CheckpointError, ensure_checkpoint, find_checkpoint_file,
    is_safetensors, load_pt, read_header, read_index, read_json, relative, remove, remove_leftovers,
    save_sharded_checkpoint, storable_tensor, tensor_files, unsavable, write_safetensors, write_whole,
)  # fmt: skip
from step03_meta_build.meta_build import dress, entered
from step04_to_empty_load.load_with_meta import (
    build_on_meta, check_fit, empty_as, find_sources, load_strict, named_tensors, names_by_tensor,
    persistent_tensors, read_checkpoint, run, set_tensor,
)  # fmt: skip
from step05_device_map.device_map import (
    forecast, parse_pairs, plan_device_map, prefixes, replay, resolve_device_map, shorten, to_dtype,
)  # fmt: skip
from step06_hooks_offload.hooks_offload import (
    AlignDevicesHook, ModelHook, OffloadTrace, add_hook_to_module, align_hooks, any_hook, dispatch_model, origins,
    real_device, remove_hook_from_module,
)  # fmt: skip

# --- one weight on disk -----------------------------------------------------------------------------------


def describe(file: Path | str) -> dict[str, dict]:
    """Say for each tensor of a safetensors file all that it takes to read it alone: name -> entry of an index.

    An entry is the header's (`dtype`, `shape`, `data_offsets`), the file and the name in it, as Accelerate calls
    them (`safetensors_file`, `weight_name`), and what the file was like when it was `seen`.
    """
    file = Path(file).absolute()  # it is the same one when the current folder changes
    seen = identity(file)
    header, _ = read_header(file)
    return {n: e | {"safetensors_file": str(file), "weight_name": n, "seen": seen} for n, e in header.items()}


def identity(file: Path | str) -> tuple[int, int, int]:
    """Say what tells a file from a later one in its place: its size, time of change, and number on the disk."""
    status = Path(file).stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def load_offloaded_weight(weight_file: Path | str, weight_info: dict) -> torch.Tensor:
    """Map a file into memory and give one tensor of it: a page is read from the disk when something touches it.

    `weight_info` is the tensor's entry of an index. Each call maps anew, and privately: what is written to the
    tensor reaches neither the file nor another reader. When the tensor goes, the mapping goes. A tensor that does
    not begin in the file as it would in memory (step 2) is copied: so it computes alike, to the last bit.
    Raises CheckpointError when the file has changed or is gone since the entry was made.
    """
    (begin, end), dtype, shape = weight_info["data_offsets"], DTYPES[weight_info["dtype"]], weight_info["shape"]
    try:
        mapped = torch.UntypedStorage.from_file(str(weight_file), shared=False, nbytes=weight_info["seen"][0])
        if identity(weight_file) != weight_info["seen"]:
            raise FileNotFoundError("another file is in its place")
    except (OSError, RuntimeError) as error:
        what = f"{relative(weight_file)} has changed or is gone since the model was loaded"
        raise CheckpointError(f"cannot read {weight_info['weight_name']}: {what}; build the model anew") from error
    if dtype == DTYPES["F4"]:  # two numbers of four bits lie in one byte
        shape = [*shape[:-1], shape[-1] // 2]
    strides = torch.empty(shape, device="meta").stride()
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(mapped[begin:end], 0, shape, strides)
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: Path | str, index: dict | None = None
) -> dict[str, dict]:
    """Write one tensor to `{weight_name}.safetensors`, whole or not at all; adds its entry to `index`, returns it.

    Raises CheckpointError for a tensor that cannot be stored, or a name that cannot be a file's.
    """
    file = Path(offload_folder) / f"{weight_name}.safetensors"
    problems = unsavable({weight_name: weight})
    if weight_name == "model" or file.parent != Path(offload_folder) or {"\\", "\0"} & set(weight_name):
        problems.append(f"{weight_name!r} would lead out of the folder, or be taken for a checkpoint")
    raise_all(problems, f"cannot offload to {relative(offload_folder)}: ", CheckpointError)
    with write_whole(file) as partial:
        write_safetensors({weight_name: storable_tensor(weight)}, partial, {"format": "pt"})
    index = {} if index is None else index
    index[weight_name] = describe(file)[weight_name]
    return index


def save_offload_index(index: dict[str, dict], offload_folder: Path | str) -> None:
    """Write which file of a folder holds which weight, beside what an older index says; it is step 2's index.

    Raises CheckpointError when a file is not in the folder, or the folder is a checkpoint of its own.
    """
    folder = Path(offload_folder).absolute()
    refuse_checkpoint(folder)
    older = read_index(folder / INDEX_NAME) if (folder / INDEX_NAME).exists() else {}
    write_offload_index(older | {name: Path(entry["safetensors_file"]) for name, entry in index.items()}, folder)


def write_offload_index(files: dict[str, Path], folder: Path) -> None:
    """Write step 2's index for files in a folder, marked as an offload's."""
    outside = [name for name, file in files.items() if not file.is_relative_to(folder)]
    raise_all(outside, f"in files that are not in {relative(folder)}: ", CheckpointError, between=", ")
    weight_map = {name: file.relative_to(folder).as_posix() for name, file in files.items()}
    with write_whole(folder / INDEX_NAME) as partial:
        partial.write_text(json.dumps({"metadata": {"offloaded": True}, "weight_map": weight_map}, indent=2))


def refuse_checkpoint(folder: Path) -> None:
    """Raise CheckpointError when a folder holds a checkpoint that is not an offload, and would be lost by one."""
    has_index = (folder / INDEX_NAME).exists()
    not_ours = has_index and "offloaded" not in (read_json(folder / INDEX_NAME).get("metadata") or {})
    if not_ours or (folder / "model.safetensors").exists():
        raise CheckpointError(f"{relative(folder)} holds a checkpoint; give another folder to offload to")


# --- many weights, as a mapping ---------------------------------------------------------------------------


class OffloadedWeightsLoader(Mapping):
    """All weights by name, each read when asked for: from `state_dict`, or from files.

    `save_folder` is a checkpoint in any form: a safetensors checkpoint needs no other offload folder. `index` has
    further entries, as `offload_weight` makes them, or Accelerate does (`safetensors_file`, `weight_name`).
    Raises CheckpointError for a checkpoint that is damaged or leads out of its folder. The name is Accelerate's.
    """

    def __init__(
        self, state_dict: Mapping | None = None, save_folder: Path | str | None = None, index: dict | None = None
    ):
        if state_dict is None and save_folder is None and index is None:
            raise ValueError("give a state_dict, a save_folder or an index")
        self.state_dict, self.index, self.files = dict(state_dict or {}), dict(index or {}), {}
        if save_folder is not None:
            self.open_checkpoint(find_checkpoint_file(save_folder))
        described = functools.cache(describe)
        for name in [name for name, entry in self.index.items() if "data_offsets" not in entry]:
            file, stored_name = self.index[name]["safetensors_file"], self.index[name].get("weight_name", name)
            if stored_name not in described(file):
                raise CheckpointError(f"{name}: {stored_name} is not in {relative(file)}")
            self.index[name] = described(file)[stored_name]
        self.weights = ChainMap(self.state_dict, self.index)

    def open_checkpoint(self, start: Path) -> None:
        """Add what a checkpoint holds; `files` says in which file each weight is."""
        if is_safetensors(start):
            self.files, aliases = tensor_files(start)
            self.files |= {alias: self.files[name] for alias, name in aliases.items()}
            own_names = {name: aliases.get(name, name) for name in self.files}
            named = {n: {"safetensors_file": self.files[n], "weight_name": own} for n, own in own_names.items()}
            self.index = named | self.index
        else:
            self.state_dict = load_pt(start) | self.state_dict
            self.files = read_index(start) if start.suffix == ".json" else dict.fromkeys(self.state_dict, start)

    def __getitem__(self, key: str) -> torch.Tensor:
        found = self.weights[key]
        return found if isinstance(found, torch.Tensor) else load_offloaded_weight(found["safetensors_file"], found)

    def __contains__(self, key: object) -> bool:
        return key in self.weights

    def __iter__(self):
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


class PrefixedDataset(Mapping):
    """The part of a mapping whose keys begin with `prefix`, under the keys without it."""

    def __init__(self, dataset: Mapping, prefix: str):
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str):
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self):
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def extract_submodules_state_dict(state_dict: Mapping, submodule_names: list[str]) -> dict[str, torch.Tensor]:
    """Take what belongs to the named modules, under its full names; names compare by dotted parts."""
    return {key: state_dict[key] for key in state_dict if not set(submodule_names).isdisjoint(prefixes(key))}


def load_state_dict(checkpoint_file: Path | str, device_map: dict | None = None) -> dict[str, torch.Tensor]:
    """Read one checkpoint's tensors, each to the device that a map gives it.

    On the CPU they are views of the mapped file: replace it by renaming, never write into it meanwhile.
    """
    tensors, _ = read_checkpoint(checkpoint_file)
    for name, tensor in tensors.items():
        device = next((device_map[p] for p in prefixes(name) if p in (device_map or {})), "cpu")
        tensors[name] = tensor.to(real_device("cpu" if device == "disk" else device))
    return tensors


# --- a folder for what cannot be read where it lies -------------------------------------------------------


def offload_state_dict(save_dir: Path | str, state_dict: Mapping, dtypes: dict | None = None) -> Path:
    """Write tensors into a folder, converted as `dtypes` says; returns the checkpoint in it that has them.

    Its name is the fingerprint of what is in it: other weights get another one, so that a model that still reads
    them is not disturbed; the same weights are not written again. It appears when it is complete. One tensor is in
    memory at a time. Delete the folder when no model uses it.
    Raises CheckpointError for tensors that cannot be stored, and for a folder that is a checkpoint of its own.
    """
    folder = Path(save_dir).absolute()
    refuse_checkpoint(folder)
    checkpoint = folder / fingerprint(state_dict, dtypes or {})
    own = checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}.partial")
    with one_writer:
        remove_leftovers(checkpoint)
        try:
            if not checkpoint.exists():
                save_sharded_checkpoint(state_dict, own, 1, dtypes)
                own.rename(checkpoint)
        except OSError:
            if not checkpoint.exists():  # another process was faster, and wrote the same
                raise
        finally:
            remove(own)
        write_offload_index(read_index(checkpoint / INDEX_NAME), folder)  # of these weights alone
    return checkpoint


one_writer = threading.Lock()  # threads take turns; processes have a partial folder each


def fingerprint(state_dict: Mapping, dtypes: dict[str, torch.dtype]) -> str:
    """Compute what tells one set of weights from another: names, dtypes, shapes and every byte."""
    raise_all(unsavable(state_dict), "cannot offload:\n  ", CheckpointError, between="\n  ")
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = storable_tensor(state_dict[name])
        digest.update(repr((name, tensor.dtype, tensor.shape, dtypes.get(name))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def keep_on_disk(
    stored: OffloadedWeightsLoader, sources: dict, dtypes: dict, device_map: dict, offload_folder: Path | None
) -> dict[str, dict]:
    """Say where what stays on disk is read, as an index: in the checkpoint itself, or else in the offload folder.

    `sources` and `dtypes` are for the model's names. Raises CheckpointError, with the entries of the map, when a
    folder is needed and none was given.
    """
    index = {name: stored.index.get(source) for name, source in sources.items()}
    rest = [name for name, entry in index.items() if entry is None or DTYPES[entry["dtype"]] != dtypes[name]]
    if rest and offload_folder is None:
        entries = {next(p for p in prefixes(name) if p in device_map) for name in rest}
        why = "in a pickle, which cannot be read piece by piece, or in another dtype"
        mend = "give an offload_folder, to write them to once"
        raise CheckpointError(f"{shorten(sorted(entries))}: to be read from disk, but stored {why}; {mend}")
    if rest:
        to_write = {sources[name]: dtypes[name] for name in rest}  # tied names have one source
        from_pickle = {source: stored.state_dict[source] for source in to_write if source in stored.state_dict}
        to_convert = {source: stored.index[source] for source in to_write if source in stored.index}
        tensors = OffloadedWeightsLoader(from_pickle, index=to_convert)
        written = OffloadedWeightsLoader(save_folder=offload_state_dict(offload_folder, tensors, to_write))
        index |= {name: written.index[sources[name]] for name in rest}
    return index


# --- the pipeline -----------------------------------------------------------------------------------------

Keys = namedtuple("Keys", "missing_keys unexpected_keys")


@contextmanager
def unchanged_on_error(model: nn.Module):
    """Give a model back its tensors and hooks when what is done in this context fails.

    What is made in it is real and may be trained, also inside `init_empty_weights` and `inference_mode`.
    """
    if any_hook(model):
        raise ValueError("the model is dispatched already; undispatch(model) first")
    tensors, hooks = named_tensors(model), {module: vars(module).get("_hf_hook") for module in model.modules()}
    try:
        with torch.inference_mode(False), torch.no_grad(), entered(None):
            yield
    except BaseException:
        for name, tensor in tensors:
            set_tensor(model, name, tensor)
        for module, hook in hooks.items():
            if hook is None:
                remove_hook_from_module(module)
            else:
                module._hf_hook = hook
        model.__dict__.pop("hf_device_map", None)
        raise


def find_homes(model: nn.Module, device_map: dict | None, offload_buffers: bool) -> dict[str, torch.device]:
    """Say where each tensor goes: to its device of the map, or to meta if it stays on disk."""
    tensors = named_tensors(model)
    if device_map is None:
        return {name: torch.device("cpu") if tensor.is_meta else tensor.device for name, tensor in tensors}
    resolved = resolve_device_map(model, device_map)
    homes = {name: real_device("cpu" if device == "disk" else device) for name, device in resolved.items()}
    stay = [n for n, t in tensors if resolved[n] == "disk" and (offload_buffers or isinstance(t, nn.Parameter))]
    return homes | dict.fromkeys(stay, torch.device("meta"))


def find_dtypes(wanted: dict[str, torch.Tensor], dtype: torch.dtype | str | None) -> dict[str, torch.dtype]:
    """Say which dtype each tensor will have: floating-point tensors `dtype`, if one is given, others their own."""
    given = to_dtype(dtype)
    if given is not None and not given.is_floating_point:
        raise ValueError(f"dtype={dtype} is no floating-point dtype; give one like 'float16'")
    return {n: given if given is not None and t.is_floating_point() else t.dtype for n, t in wanted.items()}


def stream_checkpoint(
    model: nn.Module, checkpoint: Path | str, device_map: dict | None, offload_folder: Path | str | None = None,
    dtype: torch.dtype | str | None = None, offload_buffers: bool = False, strict: bool = True, to_run: bool = True,
) -> tuple[Keys, OffloadedWeightsLoader]:  # fmt: skip
    """Bring the tensors of a checkpoint to their devices one by one; returns the keys, and what is on disk.

    With `to_run`, a tensor that nothing has values for is an error even if `strict` is off.
    """
    stored = OffloadedWeightsLoader(save_folder=checkpoint)
    wanted, sources = persistent_tensors(model), find_sources(model, stored)
    homes, dtypes = find_homes(model, device_map, offload_buffers), find_dtypes(wanted, dtype)
    check_fit(model, stored, stored.files, sources, strict)
    keys = Keys([name for name in wanted if name not in sources], [name for name in stored if name not in wanted])
    lost = [name for name in keys.missing_keys if to_run and wanted[name].is_meta]
    raise_all(lost, "neither the checkpoint nor the model has the values of ", CheckpointError, between=", ")
    on_disk = {name: source for name, source in sources.items() if homes[name].type == "meta"}
    index = keep_on_disk(stored, on_disk, dtypes, device_map, offload_folder)
    order, made = sorted(sources, key=on_disk.__contains__), {}  # of tied names, one that is in memory decides
    for name in tqdm(order, desc="weights", unit="tensor", disable=None):
        old = wanted[name]
        if id(old) not in made:
            new = empty_as(old, homes[name], dtypes[name])
            made[id(old)] = dress(new if new.is_meta else new.copy_(stored[sources[name]]), old)
    for name in order:  # from here on nothing is read, so nothing can fail
        old, new = wanted[name], made[id(wanted[name])]
        fill = device_map is None and not old.is_meta and old.dtype == new.dtype  # an optimizer may hold it
        set_tensor(model, name, old.copy_(new) if fill else new)
    own = {n: t for n, t in named_tensors(model) if homes[n].type == "meta" and n not in index and not t.is_meta}
    return keys, OffloadedWeightsLoader(own, index=index)


def load_checkpoint_in_model(
    model: nn.Module, checkpoint: Path | str, device_map: dict | None = None, offload_folder: Path | str | None = None,
    dtype: torch.dtype | str | None = None, offload_state_dict: bool | None = None, offload_buffers: bool = False,
    strict: bool = False,
) -> Keys:  # fmt: skip
    """Load a checkpoint (a file, an index, a folder) into a model, each tensor straight to its device of the map.

    For a model on meta, RAM holds what the map puts there, and one tensor; a real one stays until all is loaded.
    What is on disk is on meta afterwards: `dispatch_model` with an `OffloadedWeightsLoader` runs it. `dtype` converts
    floating-point tensors; without it they take the model's. `offload_state_dict` is there because Accelerate has
    it: nothing is ever held that it could free.
    Returns the missing and the unexpected keys; with `strict` they are an error. Raises CheckpointError, and the
    model is as it was, for all else that does not fit or cannot be read.
    """
    with unchanged_on_error(model):
        about = (device_map, offload_folder, dtype, offload_buffers, strict)
        return stream_checkpoint(model, checkpoint, *about, to_run=False)[0]


def load_checkpoint_and_dispatch(
    model: nn.Module, checkpoint: Path | str, device_map: dict | str | None = None, max_memory: dict | None = None,
    no_split_module_classes: list[str] | None = None, offload_folder: Path | str | None = None,
    offload_buffers: bool = False, dtype: torch.dtype | str | None = None, offload_state_dict: bool | None = None,
    skip_keys=None, preload_module_classes: list[str] | None = None, force_hooks: bool = False, strict: bool = True,
) -> nn.Module:  # fmt: skip
    """Load a checkpoint into a model (on meta, for its memory to count) and make it run under a device map.

    `device_map` is a map, or a strategy that step 5 plans with `max_memory`. What it puts on disk is read from
    the checkpoint itself; only pickles and a conversion by `dtype` need an `offload_folder`. The other arguments
    are those of `load_checkpoint_in_model` and `dispatch_model`. Returns the model; raises what they raise, and
    then the model is as it was.
    """
    if isinstance(device_map, str):
        options = {"no_split_module_classes": no_split_module_classes, "offload_buffers": offload_buffers}
        device_map, _ = plan_device_map(model, device_map, max_memory, dtype=dtype, **options)
    with unchanged_on_error(model):
        about = (device_map, offload_folder, dtype, offload_buffers, strict)
        _, weights = stream_checkpoint(model, checkpoint, *about)
        if device_map is None:
            return model
        return dispatch_model(
            model, device_map, weights_map=weights, offload_buffers=offload_buffers, skip_keys=skip_keys,
            preload_module_classes=preload_module_classes, force_hooks=force_hooks,
        )  # fmt: skip


def disk_offload(
    model: nn.Module, offload_dir: Path | str, execution_device=None, offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:  # fmt: skip
    """Keep all weights on disk, and bring each block to the execution device for its forward; returns the model.

    A real model's weights are written to `offload_dir`; for one on meta they are there already. By default the
    execution device is the one that the parameters are on.
    """
    here = next((p.device for p in model.parameters() if not p.is_meta), "cpu")
    where = here if execution_device is None else execution_device
    with unchanged_on_error(model):
        if any(tensor.is_meta for _, tensor in named_tensors(model)):
            _, weights = stream_checkpoint(model, offload_dir, {"": "disk"}, offload_buffers=offload_buffers)
        else:
            tensors = dict(named_tensors(model) if offload_buffers else model.named_parameters())
            first = {names[0] for names in names_by_tensor(model)}
            tensors = {name: tensor for name, tensor in tensors.items() if name in first}
            weights = OffloadedWeightsLoader(save_folder=offload_state_dict(offload_dir, tensors))
        return dispatch_model(
            model, {"": "disk"}, where, weights_map=weights, offload_buffers=offload_buffers,
            preload_module_classes=preload_module_classes,
        )  # fmt: skip


# --- reading ahead ----------------------------------------------------------------------------------------


class ReadAhead(ModelHook):
    """Asks the system, when its block begins to run, to read the one that followed it the last time.

    A block is a tuple of file ranges. `successor`, shared by a model's hooks, has for each block the one that ran
    after it, and under None the one that runs now. It is only a hint, and what is read goes into the system's
    cache of files and nowhere else: a wrong guess costs time, never values.
    """

    def __init__(self, block: tuple, successor: dict):
        self.block, self.successor = block, successor

    def pre_forward(self, module, *args, **kwargs):
        self.successor[self.successor.get(None)] = self.block
        self.successor[None] = self.block
        for file, begin, end in self.successor.get(self.block, ()):
            read_soon(file, begin, end)
        return args, kwargs


def read_soon(file: str, begin: int, end: int) -> None:
    """Ask the system to read a part of a file, and do not wait for it.

    Of one large request, Linux reads no more than its read-ahead window, mostly 128 KiB: so many small ones. A chunk
    whose last byte is in memory is not asked for: its first may be there because the one before it was read.
    """
    with suppress(OSError), Path(file).open("rb") as stream:
        for chunk in range(begin, end, 2**20):
            stop = min(chunk + 2**20, end)
            if is_cached(stream.fileno(), stop - 1):
                continue
            for start in range(chunk, stop, 2**17):
                os.posix_fadvise(stream.fileno(), start, min(2**17, stop - start), os.POSIX_FADV_WILLNEED)


def is_cached(descriptor: int, place: int) -> bool:
    """Tell whether a byte of a file can be read without waiting; where the system does not say (macOS), it cannot."""
    try:
        return os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):
        return False


def read_ahead(model: nn.Module) -> nn.Module:
    """Have the next block read from disk while one computes; returns the model, which is dispatched already.

    No memory is held, and no thread is needed: the system reads into its cache of files. Where it cannot be asked
    to (macOS, Windows), blocks are read when they run, as before.
    """
    blocks = {m: tuple(range_ for hook in align_hooks(m) for range_ in ranges_on_disk(hook)) for m in model.modules()}
    blocks = {module: block for module, block in blocks.items() if block and hasattr(os, "posix_fadvise")}
    order = list(blocks.values())  # until it has run once: as the model is defined
    successor = dict(zip(order, order[1:] + order[:1], strict=True))
    for module, block in blocks.items():
        add_hook_to_module(module, ReadAhead(block, successor), append=True)
    return model


def ranges_on_disk(hook: AlignDevicesHook) -> list[tuple[str, int, int]]:
    """List the file ranges from which a hook's weights are read; neighbours are one."""
    entries, ranges = [source for source, _ in origins(hook).values() if isinstance(source, dict)], []
    for file, begin, end in sorted((entry["safetensors_file"], *entry["data_offsets"]) for entry in entries):
        if ranges and ranges[-1][0] == file and ranges[-1][2] == begin:
            begin = ranges.pop()[1]
        ranges.append((file, begin, end))
    return ranges


# --- the lesson -------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="tiny", choices=["tiny", "small", "medium"])
    parser.add_argument("--max-memory", nargs="+", metavar="DEVICE=SIZE", help="like 0=150MB cpu=200MB disk=1GB")
    parser.add_argument("--checkpoint", type=Path, help="a folder, an index or a file; by default step 2's shards")
    args = parser.parse_args()
    paths = ensure_checkpoint(args.config)
    checkpoint = args.checkpoint or paths.shards
    model = build_on_meta(paths.config)
    total = sum(parameter.nbytes for parameter in model.parameters())
    default = {0: total * 3 // 8, "cpu": total * 2 // 3}  # each has room for a part, beside a block that comes to run
    max_memory = parse_pairs(args.max_memory) if args.max_memory else default
    device_map, table = plan_device_map(model, "auto", max_memory)
    print(f"config={args.config}")
    print(f"checkpoint={relative(checkpoint)}")
    print(f"model_bytes={total} ({format_bytes(total)})")
    for name, device in device_map.items():
        print(f"device_map[{name!r}]={device}")
    stored = OffloadedWeightsLoader(save_folder=checkpoint)
    costs = forecast(replay(model, device_map, table)[0])
    read_ahead(load_checkpoint_and_dispatch(model, checkpoint, device_map, offload_folder=ARTIFACTS / "offload"))
    wanted = model.state_dict().keys()
    print(f"missing_keys={sorted(wanted - stored.keys())}")
    print(f"unexpected_keys={sorted(stored.keys() - wanted)}")
    with OffloadTrace(model) as happened, torch.inference_mode():
        logits = model(fixed_sequences(model.token_embedding.num_embeddings))  # (2, num_classes)
    for event in happened.events:
        if event.kind == "run" and event.bytes:
            print(f"{event.block}: {event.source} -> {event.device} -> {event.source} bytes={event.bytes}")
    print("\n".join(f"forecast_{name}={count}" for name, count in costs.items()))
    print(f"peak_resident_bytes={happened.peak_resident_bytes}")
    print(f"logits_equal={torch.equal(logits, run(load_strict(build_on_meta(paths.config), checkpoint)))}")


if __name__ == "__main__":
    run_script(main)
