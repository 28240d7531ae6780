"""Step 4: give a meta model its memory and its values, and be sure that they are the right ones.

You learn the flow meta build -> `to_empty` -> strict load, the five things that it gets wrong without an error,
and one loader that is right about all of them.
Prints the flow, a verification against the model that never was on meta, each fault and its mend, and what
three ways of loading take in memory. Reads the checkpoint of step 2.
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from step01_model_def.model_def import (
    TinyTransformerClassifier,
    count_meta_parameters,
    count_parameters,
    fixed_sequences,
    run_script,
)
from step02_checkpoint.build_checkpoint import (
    CheckpointError,
    build_model,
    checkpoint_paths,
    ensure_checkpoint,
    find_checkpoint_file,
    load_config,
    load_pt,
    open_shard,
    relative,
    tensor_files,
)
from step03_meta_build.meta_build import init_empty_weights, peak_rss_mb, rss_mb

# --- tied weights -----------------------------------------------------------------------------------------


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List every parameter and buffer under every name that it has."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """List the groups of names that stand for one and the same tensor; works on meta and on real models."""
    groups = defaultdict(list)
    for name, tensor in named_tensors(model):
        groups[id(tensor)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Make each group of names one tensor again: the first of them that is real, if there is one."""
    for names in tied_params:
        tensors = [get_tensor(model, name) for name in names]
        kept = next((tensor for tensor in tensors if not tensor.is_meta), tensors[0])
        for name in names:
            set_tensor(model, name, kept)


def get_tensor(model: nn.Module, name: str) -> torch.Tensor:
    """Get a parameter or buffer by its full name."""
    prefix, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(prefix), attribute)


def set_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor where the model has a parameter or buffer of this full name."""
    prefix, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(prefix), attribute, tensor)


# --- memory for a meta model ------------------------------------------------------------------------------


def unfillable_buffers(model: nn.Module) -> list[str]:
    """List the meta buffers that no checkpoint will fill, since `persistent=False` keeps them out of it."""
    in_checkpoints = model.state_dict().keys()
    buffers = model.named_buffers(remove_duplicate=False)
    return [name for name, buffer in buffers if buffer.is_meta and name not in in_checkpoints]


UNFILLABLE = (
    "a buffer on the meta device that no checkpoint holds (persistent=False), so its values are lost; build "
    "with init_empty_weights(include_buffers=False), or set it before loading"
)


def materialize(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Give every meta tensor memory on `device`, with arbitrary values; move real ones there, values intact.

    What `to_empty` should do: real buffers keep their values, and tied weights stay tied. Returns the module.
    Raises ValueError, before anything changes, naming each buffer whose values nothing could bring back.
    """
    lost = unfillable_buffers(module)
    if lost:
        raise ValueError("\n  ".join(["cannot materialize:", *(f"{name}: {UNFILLABLE}" for name in lost)]))
    tied = find_tied_parameters(module)
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    retie_parameters(module, tied)
    return module


def check_no_meta_tensors(model: nn.Module) -> None:
    """Raise ValueError that lists what is still on meta: on a CPU such a model computes garbage in silence."""
    on_meta = [name for name, tensor in named_tensors(model) if tensor.is_meta]
    if on_meta:
        raise ValueError(f"still on the meta device, load them first: {', '.join(on_meta)}")


# --- one strict loader ------------------------------------------------------------------------------------


def read_checkpoint(checkpoint: Path | str | Mapping) -> tuple[dict[str, torch.Tensor], dict[str, Path]]:
    """Read a checkpoint's tensors as views of its files, without a copy in memory.

    Takes `.pt`, `.bin` and `.safetensors` files, an index, a folder, or a state dict. Returns the tensors by
    name, aliases included, and the file that each is from. Raises CheckpointError for damaged files.
    """
    if isinstance(checkpoint, Mapping):
        return dict(checkpoint), dict.fromkeys(checkpoint, Path("the state dict"))
    start = find_checkpoint_file(checkpoint)
    if start.suffix not in (".safetensors", ".json"):
        tensors = load_pt(start)
        return tensors, dict.fromkeys(tensors, start)
    files, aliases = tensor_files(start)
    shards = {file: open_shard(file) for file in set(files.values())}
    tensors = {name: shards[file].get_tensor(name) for name, file in files.items()}
    tensors.update({alias: tensors[name] for alias, name in aliases.items()})
    return tensors, files | {alias: files[name] for alias, name in aliases.items()}


def load_strict(model: nn.Module, checkpoint: Path | str | Mapping) -> nn.Module:
    """Load a checkpoint into a model, on meta or real, and return it; right, or an error and nothing changed.

    A meta tensor becomes a view of the checkpoint's file, in the model's dtype (another dtype costs a copy);
    a real one is filled in place. Tied weights stay tied, and one of their names in the file is enough.
    Raises CheckpointError with every problem in one message: missing, unexpected and mis-shaped tensors,
    other kinds of numbers, tied names with different values, buffers that nothing fills.
    """
    tensors, files = read_checkpoint(checkpoint)
    tied = find_tied_parameters(model)
    for names in tied:
        stored = [name for name in names if name in tensors]
        tensors.update({name: tensors[stored[0]] for name in names if stored and name not in tensors})
    problems = list_problems(model, tensors, files, tied)
    if problems:
        raise CheckpointError("\n  ".join([f"cannot load into {type(model).__name__}:", *problems]))
    on_meta = any(tensor.is_meta for _, tensor in named_tensors(model))
    values = {name: tensors[name].to(target.dtype) for name, target in model.state_dict().items()}
    if on_meta:
        values = separate_untied(values, tied)
    model.load_state_dict(values, strict=True, assign=on_meta)
    retie_parameters(model, tied)
    return model


def list_problems(model: nn.Module, tensors: dict, files: dict, tied: list[list[str]]) -> list[str]:
    """Compare a model with what a checkpoint holds, and say everything that is wrong, one text a problem."""
    wanted = model.state_dict()
    problems = [f"missing: {name} {list(wanted[name].shape)}" for name in wanted if name not in tensors]
    problems += [f"unexpected: {name}, in {relative(files[name])}" for name in tensors if name not in wanted]
    for name in wanted.keys() & tensors.keys():
        value, target, file = tensors[name], wanted[name], relative(files.get(name, Path("the same file")))
        if value.is_meta:
            problems.append(f"no values: {name} is on the meta device in {file}")
        elif value.shape != target.shape:
            problems.append(f"shape: {name} is {list(value.shape)} in {file}, the model wants {list(target.shape)}")
        elif value.dtype != target.dtype and not (value.is_floating_point() and target.is_floating_point()):
            problems.append(f"dtype: {name} is {value.dtype} in {file}, the model wants {target.dtype}")
    for names in tied:
        stored = [tensors[name] for name in names if name in files and not tensors[name].is_meta]
        if any(value is not stored[0] and not torch.equal(value, stored[0]) for value in stored):
            problems.append(f"tied: {', '.join(names)} are one tensor in the model, with different values in the file")
    problems += [f"not filled: {name}: {UNFILLABLE}" for name in unfillable_buffers(model)]
    return sorted(problems)


def separate_untied(values: dict, tied: list[list[str]]) -> dict:
    """Copy what shares memory in the checkpoint and is not tied in the model: each would change with the other."""
    group_of = {name: names[0] for names in tied for name in names}
    owner, separate = {}, {}
    for name, value in values.items():
        group = group_of.get(name, name)
        first = owner.setdefault((value.data_ptr(), value.shape), group)
        separate[name] = value if first == group or not value.numel() else value.clone()
    return separate
