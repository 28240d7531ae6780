"""Step 4: give a meta model its memory and its values, and be sure that they are the right ones.

You learn the flow meta build -> `to_empty` -> strict load, five ways in which loading by way of meta goes
wrong without an error, and one loader that is right about all of them.
Prints the flow, a verification against the model that never was on meta, each fault and its mend, and what
three ways of loading take in memory. Reads the checkpoint of step 2.
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

try:
    from step01_model_def.model_def import (
        TinyTransformerClassifier, count_meta_parameters, count_parameters, fixed_sequences, raise_all, run_script,
    )  # fmt: skip
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

import torch
from torch import nn

from step02_checkpoint.build_checkpoint import (
    CheckpointError, build_model, checkpoint_paths, ensure_checkpoint, find_checkpoint_file, is_safetensors,
    load_config, load_pt, only_tensors, open_shard, relative, tensor_files,
)  # fmt: skip
from step03_meta_build.meta_build import dress, entered, error_of, init_empty_weights, measure_rss, rss_mb, warm_up

# --- tied weights -----------------------------------------------------------------------------------------


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List every parameter and buffer under every name that it has."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """List the groups of names that stand for one and the same tensor; works on meta and on real models."""
    return [names for names in names_by_tensor(model) if len(names) > 1]


def names_by_tensor(model: nn.Module) -> list[list[str]]:
    """List for each tensor of a model all the names that it has."""
    groups = defaultdict(list)
    for name, tensor in named_tensors(model):
        groups[id(tensor)].append(name)
    return list(groups.values())


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


def empty_as(like: torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make memory on a device for a tensor of this shape, with these strides; `dtype` is its own unless given.

    For a meta tensor, `torch.empty_like` is written in Python, and imports 30 MiB of it.
    """
    if not like.is_contiguous():
        return torch.empty_like(like, dtype=dtype, device=device)
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=device)


def persistent_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Map every name that a checkpoint of this model has to the model's tensor: all but unsaved buffers."""
    modules = model.named_modules(remove_duplicate=False)
    unsaved = {f"{name}.{key}".lstrip(".") for name, m in modules for key in m._non_persistent_buffers_set}
    return {name: tensor for name, tensor in named_tensors(model) if name not in unsaved}


def unfillable_buffers(model: nn.Module) -> list[str]:
    """List the meta buffers that no checkpoint will fill, since `persistent=False` keeps them out of it."""
    fillable = persistent_tensors(model)
    return [name for name, tensor in named_tensors(model) if tensor.is_meta and name not in fillable]


UNFILLABLE = "a meta buffer that no checkpoint holds (persistent=False): build with include_buffers=False, or set it"


def materialize(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Give every meta tensor memory on `device`, with arbitrary values; move real ones there, values intact.

    What `to_empty` should do: real buffers keep their values, tied weights stay tied, and parameters keep
    their class and attributes. Returns the module.
    Raises ValueError, before anything changes, naming each buffer whose values nothing could bring back.
    """
    lost = unfillable_buffers(module)
    raise_all([f"{name}: {UNFILLABLE}" for name in lost], "cannot materialize:\n  ", between="\n  ")
    with entered(None):  # also inside init_empty_weights, what is set here is real
        for names in names_by_tensor(module):
            old = get_tensor(module, names[0])
            new = empty_as(old, device) if old.is_meta else old.to(device)
            new = new if new is old else dress(new, old)
            for name in names:
                set_tensor(module, name, new)
    return module


def check_no_meta_tensors(model: nn.Module) -> None:
    """Raise ValueError that lists what is still on meta: a CPU may compute garbage with it, without an error."""
    on_meta = [name for name, tensor in named_tensors(model) if tensor.is_meta]
    raise_all(on_meta, "still on the meta device, load them first: ", between=", ")


# --- one strict loader ------------------------------------------------------------------------------------


def read_checkpoint(checkpoint: Path | str | Mapping) -> tuple[dict[str, torch.Tensor], dict[str, Path]]:
    """Read a checkpoint's tensors as views of its files, without a copy in memory.

    Takes `.pt`, `.bin` and `.safetensors` files, an index, a folder, or a state dict, which is copied. Returns
    the tensors by name, aliases included, and the file that each is from. Raises CheckpointError for damage.
    """
    if isinstance(checkpoint, Mapping):
        source = "the state dict"
        tensors = {name: tensor.clone() for name, tensor in only_tensors(checkpoint, source).items()}
        return tensors, dict.fromkeys(tensors, Path(source))
    start = find_checkpoint_file(checkpoint)
    if not is_safetensors(start):
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
    While the model lives, replace its file by renaming another over it (step 2's `write_whole`); writing into
    a mapped file, as `torch.save` does, changes the model or ends the process.
    Raises CheckpointError with every problem in one message: missing, unexpected and mis-shaped tensors,
    other kinds of numbers, tied names with different values, buffers that nothing fills.
    """
    tensors, files = read_checkpoint(checkpoint)
    sources, tied = find_sources(model, tensors), find_tied_parameters(model)
    check_fit(model, tensors, files, sources)
    wanted = persistent_tensors(model)
    on_meta = {name: tensors[sources[name]].to(old.dtype) for name, old in wanted.items() if old.is_meta}
    on_meta = separate_untied(on_meta, tied)
    with torch.no_grad(), entered(None):  # also inside init_empty_weights, what is set here is real
        for name, old in wanted.items():
            set_tensor(model, name, dress(on_meta[name], old)) if old.is_meta else old.copy_(tensors[sources[name]])
        retie_parameters(model, tied)
    return model


def find_sources(model: nn.Module, stored: Mapping) -> dict[str, str]:
    """Find for each tensor of a model the name in a checkpoint that gives its value: its own, or a tied one's."""
    wanted = persistent_tensors(model)
    groups = [[name for name in names if name in stored] + names for names in names_by_tensor(model)]
    return {name: names[0] for names in groups for name in names if name in wanted and names[0] in stored}


def check_fit(model: nn.Module, stored: Mapping, files: dict, sources: dict[str, str], strict: bool = True) -> None:
    """Raise CheckpointError that lists all that keeps a checkpoint from filling a model, one line a problem.

    Without `strict`, what is missing or unexpected is none; the rest always is.
    """
    wanted = persistent_tensors(model)
    problems = [f"missing: {name} {list(wanted[name].shape)}" for name in wanted if strict and name not in sources]
    problems += [f"unexpected: {n}, in {relative(files[n])}" for n in stored if strict and n not in wanted]
    for name in sources:
        same, target = sources[name] if name not in stored else name, wanted[name]
        value, here = stored[same], f"in {relative(files[same])}"
        castable = value.is_floating_point() and target.is_floating_point()
        if value.is_meta:
            problems.append(f"no values: {name} is on the meta device {here}")
        elif value.shape != target.shape:
            problems.append(f"shape: {name} is {list(value.shape)} {here}; the model wants {list(target.shape)}")
        elif value.dtype != target.dtype and not castable:
            problems.append(f"dtype: {name} is {value.dtype} {here}; the model wants {target.dtype}")
    for names in find_tied_parameters(model):
        values = [stored[name] for name in names if name in stored and not stored[name].is_meta]
        if any(value is not values[0] and not same_bytes(value, values[0]) for value in values):
            problems.append(f"tied: {', '.join(names)}: one tensor in the model, different values in the file")
    problems += [f"not filled: {name}: {UNFILLABLE}" for name in unfillable_buffers(model)]
    raise_all(sorted(problems), f"cannot load into {type(model).__name__}:\n  ", CheckpointError, between="\n  ")


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors hold the same bytes; unlike `torch.equal`, NaN is like itself."""
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))


def separate_untied(values: dict, tied: list[list[str]]) -> dict:
    """Copy what overlaps in the checkpoint's memory but is not tied in the model, where each changes alone."""
    group_of = {name: names[0] for names in tied for name in names}
    separate, end, owner = {}, 0, None
    whole = {name: value.contiguous() for name, value in values.items()}
    for name, value in sorted(whole.items(), key=lambda item: item[1].data_ptr()):
        group = group_of.get(name, name)
        overlaps = value.numel() > 0 and value.data_ptr() < end and group != owner
        separate[name] = value.clone() if overlaps else value
        if not overlaps:
            end, owner = max(end, value.data_ptr() + value.nbytes), group
    return separate


# --- the flow ---------------------------------------------------------------------------------------------


def build_on_meta(config_path: Path) -> TinyTransformerClassifier:
    """Build the model that a config file describes, on the meta device and in eval mode."""
    with init_empty_weights():
        return TinyTransformerClassifier(**load_config(config_path)).eval()


def load_plain(config_name: str) -> nn.Module:
    """Load as everybody starts: a real model, then a state dict beside it. Two models in memory."""
    paths = checkpoint_paths(config_name)
    model = TinyTransformerClassifier(**load_config(paths.config)).eval()
    model.load_state_dict(torch.load(paths.weights, weights_only=True), strict=True)
    return model


def load_to_empty(config_name: str) -> nn.Module:
    """Load by way of `to_empty`: no random values are drawn, but there are still two models in memory."""
    paths = checkpoint_paths(config_name)
    model = build_on_meta(paths.config).to_empty(device="cpu")
    model.load_state_dict(torch.load(paths.weights, weights_only=True), strict=True)
    return model


def load_mapped(config_name: str) -> nn.Module:
    """Load by `load_strict`: the meta tensors become views of the mapped file. One model in memory."""
    paths = checkpoint_paths(config_name)
    return load_strict(build_on_meta(paths.config), paths.weights)


def run(model: nn.Module, sequences: int = 2) -> torch.Tensor:
    """Run the fixed sequences through a model that is whole; returns logits (sequences, num_classes)."""
    check_no_meta_tensors(model)
    input_ids = fixed_sequences(model.token_embedding.num_embeddings)[:sequences]  # (sequences, 8)
    with torch.inference_mode():
        return model(input_ids)


def run_flow(config_name: str) -> nn.Module:
    """Go through the simple flow, printing what is where after each move; returns the loaded model."""
    paths = ensure_checkpoint(config_name)
    warm_up()
    print(f"rss_start_mb={rss_mb():.1f}")
    model = build_on_meta(paths.config)
    print(f"after_meta_build_rss_mb={rss_mb():.1f}")
    print(f"parameters={count_parameters(model)}")
    print(f"meta_parameter_tensors={count_meta_parameters(model)}")
    print(f"first_parameter_device_before_to_empty={next(model.parameters()).device}")
    model = model.to_empty(device="cpu")
    print(f"first_parameter_device_after_to_empty={next(model.parameters()).device}")
    state_dict = torch.load(paths.weights, weights_only=True)
    missing, unexpected = model.load_state_dict(state_dict, strict=True)
    print(f"missing_keys={missing}")
    print(f"unexpected_keys={unexpected}")
    print(f"after_load_rss_mb={rss_mb():.1f}")
    logits = run(model)  # (2, num_classes)
    print(f"logits={[[round(value, 4) for value in row] for row in logits.tolist()]}")
    print(f"predicted_classes={logits.argmax(dim=1).tolist()}")
    return model


def verify(model: nn.Module, config_name: str) -> None:
    """Print that a loaded model is the one that was saved, on one sequence, bit for bit."""
    saved = load_pt(checkpoint_paths(config_name).weights)
    output = run(model, sequences=1)  # (1, num_classes)
    print("missing", sorted(model.state_dict().keys() - saved.keys()))
    print("unexpected", sorted(saved.keys() - model.state_dict().keys()))
    print("output_device", output.device)
    print("output_shape", list(output.shape))
    print("has_nan", bool(output.isnan().any()))
    print("logits_equal", torch.equal(output, run(build_model(config_name), sequences=1)))


# --- what the simple flow gets wrong ----------------------------------------------------------------------


class TiedModel(nn.Module):
    """A model with the two things that the simple flow breaks: a tied weight and a table no checkpoint holds.

    Input: ids (batch, seq). Output: scores (batch, seq, vocab).
    """

    def __init__(self, vocab: int = 16, hidden: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embedding.weight
        angles = torch.arange(32).unsqueeze(1) / torch.arange(1, hidden + 1)  # (32, hidden)
        self.register_buffer("table", angles.sin(), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.table[: input_ids.shape[1]]  # (batch, seq, hidden)
        return self.head(x)  # (batch, seq, vocab)


def is_right(model: nn.Module, normal: nn.Module) -> bool:
    """Tell whether a model gives what the normally built one gives, bit for bit, and is still tied."""
    input_ids = fixed_sequences(16)  # (2, 8)
    with torch.inference_mode():
        same = torch.equal(model(input_ids), normal(input_ids))
    return same and model.head.weight is model.embedding.weight


def empty_tied_model() -> nn.Module:
    """Build a TiedModel whose parameters are on meta, and its table real."""
    with init_empty_weights():
        return TiedModel()


@contextmanager
def uninitialised_memory_is_nan():
    """Have PyTorch fill memory that has no values yet with NaN, so that its use is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def fault_to_empty(normal: nn.Module) -> None:
    """`to_empty` throws away the values of what was real, and unties; no strict load can notice."""
    with uninitialised_memory_is_nan():
        model = empty_tied_model().to_empty(device="cpu")
    print(f"to_empty_missing_keys={model.load_state_dict(normal.state_dict(), strict=True).missing_keys}")
    print(f"to_empty_keeps_table={torch.equal(model.table, normal.table)}")
    print(f"to_empty_keeps_tie={model.head.weight is model.embedding.weight}")
    print(f"to_empty_parameters={count_parameters(model)} ({count_parameters(normal)} when tied)")


def mend_to_empty(normal: nn.Module) -> None:
    """Give memory only to what has none, keep ties, then load: the same model as the normally built one."""
    with uninitialised_memory_is_nan():
        model = materialize(empty_tied_model(), "cpu")
    print(f"materialize_then_load_strict_is_right={is_right(load_strict(model, normal.state_dict()), normal)}")


def fault_lost_buffer(normal: nn.Module) -> None:
    """A buffer built on meta that no checkpoint holds never gets values; we refuse it by name."""
    with init_empty_weights(include_buffers=True):
        model, ours = TiedModel(), TiedModel()
    with uninitialised_memory_is_nan():
        model.to_empty(device="cpu")
    print(f"lost_buffer_missing_keys={model.load_state_dict(normal.state_dict(), strict=True).missing_keys}")
    print(f"lost_buffer_has_its_values={torch.equal(model.table, normal.table)}")
    print(f"lost_buffer_error={' '.join(error_of(load_strict, ours, normal.state_dict()).split())}")


def fault_assign(normal: nn.Module) -> None:
    """`assign=True` makes a parameter of its own for each name, and so unties."""
    model = empty_tied_model()
    model.load_state_dict(normal.state_dict(), assign=True)
    print(f"assign_keeps_tie={model.head.weight is model.embedding.weight}")
    print(f"assign_parameters={count_parameters(model)} ({count_parameters(normal)} when tied)")
    print(f"load_strict_is_right={is_right(load_strict(empty_tied_model(), normal.state_dict()), normal)}")


def fault_no_assign(normal: nn.Module) -> None:
    """Loading into meta tensors without `assign` does nothing, and only warns."""
    model = empty_tied_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_state_dict(normal.state_dict(), strict=True)
    print(f"no_assign_warnings={len(caught)}")
    print(f"no_assign_error={error_of(check_no_meta_tensors, model)}")


def measure_peaks(config_name: str) -> dict[str, dict]:
    """Measure three ways to load and run a model, each in a fresh process: way -> what `measure_rss` returns."""
    ways = ["load_plain", "load_to_empty", "load_mapped"]
    setup = "from step04_to_empty_load.load_with_meta import *; warm_up(); run(load_plain('tiny'))"
    return {way: measure_rss(f"model = {way}({config_name!r}); run(model)", setup) for way in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="tiny", choices=["tiny", "small", "medium"])
    parser.add_argument("--measure", default="small", choices=["tiny", "small", "medium"], help="model for the peaks")
    args = parser.parse_args()

    verify(run_flow(args.config), args.config)

    torch.manual_seed(0)
    normal = TiedModel()
    fault_to_empty(normal)
    mend_to_empty(normal)
    fault_lost_buffer(normal)
    fault_assign(normal)
    fault_no_assign(normal)

    ensure_checkpoint(args.measure)
    size = sum(tensor.nbytes for tensor in load_pt(checkpoint_paths(args.measure).weights).values())
    print(f"{args.measure}_bytes={size}")
    for way, growth in measure_peaks(args.measure).items():
        peak = growth["peak_mb"]
        print(f"{args.measure}_{way}_peak_rss_mb={peak:.1f} ({peak * 2**20 / size:.2f} x the model)")
        print(f"{args.measure}_{way}_file_backed_mb={growth['file_mb']:.1f}")


if __name__ == "__main__":
    run_script(main)
