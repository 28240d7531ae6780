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
import math
import mmap
from collections import namedtuple
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from tqdm import tqdm

from step01_model_def.model_def import fixed_sequences, format_bytes, run_script
from step02_checkpoint.build_checkpoint import (
    DTYPES, INDEX_NAME, CheckpointError, ensure_checkpoint, find_checkpoint_file, is_safetensors, load_pt, read_header,
    read_index, read_json, relative, save_sharded_checkpoint, storable_tensor, tensor_files, unsavable, write_whole,
)  # fmt: skip
from step03_meta_build.meta_build import dress, entered
from step04_to_empty_load.load_with_meta import (
    build_on_meta, check_fit, find_sources, load_strict, named_tensors, names_by_tensor, persistent_tensors,
    read_checkpoint, run, set_tensor,
)  # fmt: skip
from step05_device_map.device_map import (
    forecast, parse_pairs, plan_device_map, prefixes, replay, resolve_device_map, shorten, to_dtype,
)  # fmt: skip
from step06_hooks_offload.hooks_offload import (
    OffloadTrace, any_hook, dispatch_model, real_device, remove_hook_from_submodules,
)  # fmt: skip

# --- one weight on disk -----------------------------------------------------------------------------------


def describe(file: Path | str) -> dict[str, dict]:
    """Say for each tensor of a safetensors file all that it takes to read it alone: name -> entry of an index.

    An entry has the names that Accelerate gives it (`safetensors_file`, `weight_name`, `dtype`), and `shape`,
    `bytes` (where they begin and end in the file) and `seen` (what the file was like).
    """
    seen = identity(file)
    return {
        name: {
            "safetensors_file": str(file), "weight_name": name, "dtype": DTYPES[entry["dtype"]],
            "shape": entry["shape"], "bytes": entry["data_offsets"], "seen": seen,
        }
        for name, entry in read_header(file)[0].items()
    }  # fmt: skip


def identity(file: Path | str) -> tuple[int, int, int]:
    """Say what tells a file from a later one in its place: size, time of change, and number on the disk."""
    status = Path(file).stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def load_offloaded_weight(weight_file: Path | str, weight_info: dict) -> torch.Tensor:
    """Map the bytes of one tensor into memory; they are read from the disk when something computes with them.

    `weight_info` is its entry of an index. The memory is private: what is written to it never reaches the file.
    Raises CheckpointError when the file has changed or is gone since the entry was made.
    """
    begin, end = weight_info["bytes"]
    page, pages = begin - begin % mmap.ALLOCATIONGRANULARITY, b""  # a mapping begins at a whole page
    try:
        if identity(weight_file) != weight_info["seen"]:
            raise FileNotFoundError("another file is in its place")
        with Path(weight_file).open("rb") as stream:
            if end > begin:
                pages = mmap.mmap(stream.fileno(), end - page, access=mmap.ACCESS_COPY, offset=page)
    except (OSError, ValueError) as error:
        what = f"{relative(weight_file)} has changed or is gone since the model was loaded"
        raise CheckpointError(f"cannot read {weight_info['weight_name']}: {what}; load the model again") from error
    dtype, shape = weight_info["dtype"], weight_info["shape"]
    values = torch.frombuffer(pages, dtype=dtype, offset=begin - page) if pages else torch.empty(0, dtype=dtype)
    if values.numel() != math.prod(shape):  # two numbers of four bits lie in one byte
        shape = [*shape[:-1], shape[-1] // 2]
    return values.reshape(shape)


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: Path | str, index: dict | None = None
) -> dict[str, dict]:
    """Write one tensor to `{weight_name}.safetensors`, whole or not at all; adds its entry to `index`, returns it.

    Raises CheckpointError for a tensor that cannot be stored, or a name that is no name of a file.
    """
    file = Path(offload_folder) / f"{weight_name}.safetensors"
    problems = unsavable({weight_name: weight})
    if file.parent != Path(offload_folder) or "\\" in weight_name or "\0" in weight_name:
        problems.append(f"{weight_name!r} would lead out of the folder")
    if problems:
        raise CheckpointError(f"cannot offload to {relative(offload_folder)}: {'; '.join(problems)}")
    with write_whole(file) as partial:
        safetensors.torch.save_file({weight_name: storable_tensor(weight)}, partial, metadata={"format": "pt"})
    index = {} if index is None else index
    index[weight_name] = describe(file)[weight_name]
    return index


def save_offload_index(index: dict[str, dict], offload_folder: Path | str) -> None:
    """Write which file of a folder holds which weight, beside what an older index says; it is step 2's index."""
    file = Path(offload_folder) / INDEX_NAME
    older = {n: f.relative_to(file.parent).as_posix() for n, f in read_index(file).items()} if file.exists() else {}
    weight_map = older | {name: Path(entry["safetensors_file"]).name for name, entry in index.items()}
    with write_whole(file) as partial:
        partial.write_text(json.dumps({"metadata": {"offloaded_from": ""}, "weight_map": weight_map}, indent=2))


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
        self.state_dict, self.index, self.files = dict(state_dict or {}), {}, {}
        described = functools.cache(describe)
        if save_folder is not None:
            start = find_checkpoint_file(save_folder)
            if is_safetensors(start):
                self.files, aliases = tensor_files(start)
                self.files |= {alias: self.files[name] for alias, name in aliases.items()}
                self.index = {name: described(file)[aliases.get(name, name)] for name, file in self.files.items()}
            else:
                self.state_dict = load_pt(start) | self.state_dict
                self.files = read_index(start) if start.suffix == ".json" else dict.fromkeys(self.state_dict, start)
        for name, entry in (index or {}).items():
            found = described(entry["safetensors_file"]) if "bytes" not in entry else {}
            self.index[name] = found.get(entry.get("weight_name", name), entry)

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        return load_offloaded_weight(self.index[key]["safetensors_file"], self.index[key])

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self):
        return iter({**self.state_dict, **self.index})

    def __len__(self) -> int:
        return len({**self.state_dict, **self.index})

    def only(self, names) -> "OffloadedWeightsLoader":
        """Take some of the weights, without reading them."""
        taken = ({name: part[name] for name in names if name in part} for part in (self.state_dict, self.index))
        return OffloadedWeightsLoader(next(taken), index=next(taken))


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
    """Read one checkpoint's tensors, each to the device that a map gives it; the CPU's and the disk's are mapped."""
    tensors, _ = read_checkpoint(checkpoint_file)
    for name, tensor in tensors.items():
        device = next((device_map[p] for p in prefixes(name) if p in (device_map or {})), "cpu")
        tensors[name] = tensor.to(real_device("cpu" if device == "disk" else device))
    return tensors


# --- a folder for what cannot be read where it lies -------------------------------------------------------


def offload_state_dict(
    save_dir: Path | str, state_dict: Mapping, dtypes: dict | None = None, offloaded_from: str = ""
) -> None:
    """Write tensors to a folder as a checkpoint, in place of an older offload; whole or not at all.

    One tensor is in memory at a time. `offloaded_from` is the fingerprint of where they come from. Raises
    CheckpointError when the folder holds a checkpoint that is not an offload, which would be lost.
    """
    folder = Path(save_dir)
    if (folder / "model.safetensors").exists() or ((folder / INDEX_NAME).exists() and origin(folder) is None):
        raise CheckpointError(f"{relative(folder)} holds a checkpoint, which would be replaced; give another folder")
    save_sharded_checkpoint(state_dict, folder, 1, dtypes, offloaded_from=offloaded_from)


def origin(folder: Path) -> str | None:
    """Read from which source a folder was offloaded; None where it is no offload folder, or a damaged one."""
    try:
        tensor_files(folder)
        return read_json(Path(folder) / INDEX_NAME)["metadata"].get("offloaded_from")
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return None


def fingerprint(files: set[Path], dtypes: dict[str, torch.dtype]) -> str:
    """Compute what tells one source from another: the bytes of its files, and what is taken from them."""
    digest = hashlib.sha256(repr(sorted(dtypes.items(), key=str)).encode())
    for file in sorted(files):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def keep_on_disk(
    stored: OffloadedWeightsLoader, sources: dict, dtypes: dict, device_map: dict, offload_folder: Path | None
) -> OffloadedWeightsLoader:
    """Say where what stays on disk is read: in the checkpoint itself, or else in the offload folder.

    `sources` and `dtypes` are for the model's names. Raises CheckpointError, with the entries of the map, when a
    folder is needed and none was given.
    """
    kept = {name: stored.index[source] for name, source in sources.items() if source in stored.index}
    kept = {name: entry for name, entry in kept.items() if entry["dtype"] == dtypes[name]}
    rest = {source: dtypes[name] for name, source in sources.items() if name not in kept}
    if rest and offload_folder is None:
        entries = {next(p for p in prefixes(name) if p in device_map) for name in sources.keys() - kept.keys()}
        why = "in a pickle, which cannot be read piece by piece, or in another dtype"
        mend = "give an offload_folder, to write them to once"
        raise CheckpointError(f"{shorten(sorted(entries))}: to be read from disk, but stored {why}; {mend}")
    if rest:
        source = fingerprint({stored.files[name] for name in rest}, rest)
        if origin(offload_folder) != source:
            offload_state_dict(offload_folder, stored.only(rest), rest, source)
        written = OffloadedWeightsLoader(save_folder=offload_folder).index
        kept |= {name: written[s] for name, s in sources.items() if name not in kept}
    return OffloadedWeightsLoader(index=kept)


# --- the pipeline -----------------------------------------------------------------------------------------

Keys = namedtuple("Keys", "missing_keys unexpected_keys")


@contextmanager
def unchanged_on_error(model: nn.Module):
    """Give a model back its tensors, and no hooks, when what is done in this context fails."""
    if any_hook(model):
        raise ValueError("the model is dispatched already; undispatch(model) first")
    before = named_tensors(model)
    try:
        yield
    except BaseException:
        remove_hook_from_submodules(model)
        model.__dict__.pop("hf_device_map", None)
        for name, tensor in before:
            set_tensor(model, name, tensor)
        raise


def stream_checkpoint(
    model: nn.Module, checkpoint: Path | str, device_map: dict | None, offload_folder: Path | str | None,
    dtype: torch.dtype | str | None, offload_buffers: bool, strict: bool,
) -> tuple[Keys, OffloadedWeightsLoader]:  # fmt: skip
    """Bring the tensors of a checkpoint to their devices one by one; returns the keys, and what is on disk."""
    stored = OffloadedWeightsLoader(save_folder=checkpoint)
    wanted, sources = persistent_tensors(model), find_sources(model, stored)
    homes = {name: "cpu" if tensor.is_meta else tensor.device for name, tensor in wanted.items()}
    homes |= {} if device_map is None else resolve_device_map(model, device_map)
    moves = {n for n, tensor in wanted.items() if offload_buffers or isinstance(tensor, nn.Parameter)}
    on_disk = {n: source for n, source in sources.items() if homes[n] == "disk" and n in moves}
    devices = {home: real_device("cpu" if home == "disk" else home) for home in set(homes.values())}
    if dtype and not to_dtype(dtype).is_floating_point:
        raise ValueError(f"dtype={dtype} would turn weights into whole numbers; give one like 'float16'")
    dtypes = {n: to_dtype(dtype) if dtype and t.is_floating_point() else t.dtype for n, t in wanted.items()}
    check_fit(model, stored, stored.files, sources, strict)
    weights, made = keep_on_disk(stored, on_disk, dtypes, device_map, offload_folder), {}
    order = sorted(sources, key=on_disk.__contains__)  # of tied names, one that is not on disk decides
    with torch.no_grad(), entered(None):  # also inside init_empty_weights, what is set here is real
        for name in tqdm(order, desc="weights", unit="tensor", disable=None):
            old, value = wanted[name], stored[sources[name]]
            if device_map is None and not old.is_meta and old.dtype == dtypes[name]:
                made[id(old)] = old.copy_(value)  # an optimizer may hold it
            elif id(old) not in made:
                home = "meta" if name in on_disk else devices[homes[name]]
                made[id(old)] = dress(value.to(home, dtypes[name], copy=True), old)
            set_tensor(model, name, made[id(old)])
    return Keys([n for n in wanted if n not in sources], [n for n in stored if n not in wanted]), weights


def load_checkpoint_in_model(
    model: nn.Module, checkpoint: Path | str, device_map: dict | None = None, offload_folder: Path | str | None = None,
    dtype: torch.dtype | str | None = None, offload_state_dict: bool | None = None, offload_buffers: bool = False,
    strict: bool = False,
) -> Keys:  # fmt: skip
    """Load a checkpoint (a file, an index, a folder) into a model, each tensor straight to its device of the map.

    In RAM there is never more than what the map puts there, and one tensor. What is on disk stays on meta. `dtype`
    converts floating-point tensors; without it they take the model's. `offload_state_dict` is there because
    Accelerate has it: nothing is ever held that it could free.
    Returns the missing and the unexpected keys; with `strict` they are an error. Raises CheckpointError, and the
    model is as it was, for all else that does not fit or cannot be read.
    """
    with unchanged_on_error(model):
        return stream_checkpoint(model, checkpoint, device_map, offload_folder, dtype, offload_buffers, strict)[0]


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
        if device_map is not None:
            options = {"skip_keys": skip_keys, "preload_module_classes": preload_module_classes}
            options |= {"offload_buffers": offload_buffers, "force_hooks": force_hooks}
            dispatch_model(model, device_map, weights_map=weights, **options)
    return model


def disk_offload(
    model: nn.Module, offload_dir: Path | str, execution_device=None, offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:  # fmt: skip
    """Keep all weights on disk, and bring each block to the execution device for its forward; returns the model.

    A real model's weights are written to `offload_dir`; for one on meta they are there already. By default the
    execution device is the one that the parameters are on.
    """
    here = next((p.device for p in model.parameters() if not p.is_meta), None)
    options = {"offload_buffers": offload_buffers, "preload_module_classes": preload_module_classes}
    with unchanged_on_error(model):
        if here is None:
            _, weights = stream_checkpoint(model, offload_dir, {"": "disk"}, None, None, offload_buffers, True)
        else:
            tensors = dict(named_tensors(model) if offload_buffers else model.named_parameters())
            first = {names[0] for names in names_by_tensor(model)}
            offload_state_dict(offload_dir, {name: tensor for name, tensor in tensors.items() if name in first})
            weights = OffloadedWeightsLoader(save_folder=offload_dir)
        where = execution_device if execution_device is not None else here or "cpu"
        return dispatch_model(model, {"": "disk"}, where, weights_map=weights, **options)


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
    load_checkpoint_and_dispatch(model, checkpoint, device_map)
    print(f"missing_keys={sorted(model.state_dict().keys() - stored.keys())}")
    print(f"unexpected_keys={sorted(stored.keys() - model.state_dict().keys())}")
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
