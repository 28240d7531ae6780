"""Step 2: write a checkpoint, the file that a model is loaded from.

You learn what a `state_dict` is, and the two forms it has on disk: one `.pt` file, and shards of safetensors
with an index, the form in which large models are published.
Writes `artifacts/model_config.json`, `artifacts/tiny_transformer.pt` and `artifacts/tiny_transformer/`;
prints what it wrote.
"""

import argparse
import json
import os
import pickle
import re
import shutil
import zipfile
from collections import Counter, namedtuple
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

try:
    from step01_model_def.model_def import (
        CONFIGS, SEED, SIZES, TinyTransformerClassifier, config_problems, format_bytes, raise_all, run_script,
    )  # fmt: skip
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

import psutil
import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm


ROOT = Path(__file__).resolve().parents[1]
ARTIFACTS = ROOT / "artifacts"
INDEX_NAME = "model.safetensors.index.json"
DTYPES = {  # how safetensors writes them
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
ALIGNMENT = 64  # bytes; where a tensor begins in PyTorch's own memory: at a multiple of this


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read as asked: says what is wrong, in which file, and the mend."""


# --- where things are -------------------------------------------------------------------------------------


# Where one configuration's checkpoint is: its config, its weights in one file, its weights in shards.
CheckpointPaths = namedtuple("CheckpointPaths", "config weights shards")


def checkpoint_paths(config_name: str = "tiny") -> CheckpointPaths:
    """Say where the checkpoint of a configuration is, whether it exists or not."""
    folder = ARTIFACTS if config_name == "tiny" else ARTIFACTS / config_name
    name = f"{config_name}_transformer"
    return CheckpointPaths(folder / "model_config.json", folder / f"{name}.pt", folder / name)


def relative(path: Path) -> str:
    """Write a path as seen from the repository, the same on every machine."""
    path = Path(path)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def parse_size(size: int | str) -> int:
    """Read a number of bytes: `4096`, `"200KB"` (200 * 1000), `"10GiB"` (10 * 1024**3).

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*(?:(?:([KMGT])(I)?)?B)?\s*", str(size), re.IGNORECASE)
    if match is None or isinstance(size, bool):
        raise ValueError(f"{size!r} is not a size; write it like 4096, '200KB', '1.5GB' or '10GiB'")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index((prefix or " ").upper()))


# --- writing: whole or not at all -------------------------------------------------------------------------


@contextmanager
def write_whole(path: Path):
    """Give a temporary path to write a file or a folder at; put it in the place of `path` when complete.

    Whatever happens before that, `path` keeps its old content. Raises OSError when the disk is full or
    read-only, saying so.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        yield partial
        flush_to_disk(partial)
        replace_folder(partial, path) if partial.is_dir() else partial.replace(path)
    except OSError as error:
        mend = "Free some space on the disk, or make the folder writable, and run the command again"
        raise OSError(f"cannot write {relative(path)} ({error}); what was there is untouched. {mend}") from error
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove what writers of this path have left that were killed; one that still runs keeps its own."""
    for partial in path.parent.glob(f".{path.name}.*.partial"):
        pid = partial.name.split(".")[-2]
        if pid == str(os.getpid()) or not psutil.pid_exists(int(pid)):
            remove(partial)


def flush_to_disk(path: Path) -> None:
    """Wait until the files are on the disk, so that a power cut after the rename cannot leave them empty."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file() and not file.is_symlink():
            descriptor = os.open(file, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def parked_folder(folder: Path) -> Path:
    """Name the place where an older folder waits while its successor is put in its place."""
    return folder.with_name(f".{folder.name}.old")


def replace_folder(new: Path, folder: Path) -> None:
    """Put the folder `new` in the place of `folder`.

    A folder that has files cannot be replaced by one rename. Killed between the two, there is no `folder`,
    and `recover_folder` brings the old one back.
    """
    recover_folder(folder)
    if folder.exists():
        folder.rename(parked_folder(folder))
    new.rename(folder)
    remove(parked_folder(folder))


def recover_folder(folder: Path) -> None:
    """Finish a `replace_folder` that was killed: the old folder comes back unless the new one is there."""
    parked = parked_folder(folder)
    if folder.exists():
        remove(parked)
    elif parked.exists():
        parked.rename(folder)


# --- a sharded checkpoint ---------------------------------------------------------------------------------


def find_aliases(state_dict: dict) -> dict[str, str]:
    """Find the names that stand for a tensor which an earlier name already holds: alias -> first name."""
    first_name, aliases = {}, {}
    for name, tensor in state_dict.items():
        view = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        place = (tensor.device, tensor.data_ptr(), view)
        first = first_name.setdefault(place, name) if tensor.numel() else name
        if first != name:
            aliases[name] = first
    return aliases


def plan_shards(sizes: dict[str, int], max_shard_size: int) -> list[list[str]]:
    """Fill shards in order, each up to `max_shard_size` bytes; a larger tensor gets a shard of its own."""
    shards, room = [], -1
    for name, size in sizes.items():
        if size > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(name)
        room -= size
    return shards


def unsavable(state_dict: dict) -> list[str]:
    """Say what in a state dict cannot be written to safetensors, one text a problem, with the full name."""
    problems = []
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            problems.append(f"{name}: of type {type(tensor).__name__}, not a tensor")
        elif tensor.is_meta:
            problems.append(f"{name}: on the meta device, it has no values; load the weights first")
        elif tensor.layout != torch.strided:
            problems.append(f"{name}: layout {tensor.layout}; make it dense with .to_dense()")
        elif name == "__metadata__":
            problems.append(f"{name}: a name that the file format keeps for itself")
        elif tensor.dtype not in DTYPES.values():
            problems.append(f"{name}: safetensors has no name for {tensor.dtype}; convert it first")
    return problems


def storable_tensor(tensor: torch.Tensor, dtype=None, uses: Counter | None = None) -> torch.Tensor:
    """Make a tensor as safetensors wants it: on the CPU, contiguous, apart from others that use its memory."""
    tensor = tensor.detach().to("cpu", dtype).resolve_conj().resolve_neg().contiguous()
    return tensor.clone() if uses and uses[tensor.untyped_storage().data_ptr()] > 1 else tensor


def save_sharded_checkpoint(
    state_dict: Mapping, folder: Path, max_shard_size: int | str = "100MB", dtypes: dict | None = None
) -> dict:
    """Write a state dict as `model-00001-of-0000N.safetensors` files and an index; returns the index.

    The index has `weight_map` (tensor name -> file) and `metadata.total_size` (bytes). A tensor with several
    names (tied weights) is written once, under its first name; each other name is in the header of that file,
    as `safetensors.torch.save_model` records it: `__metadata__[alias] = name`. The tensors that `dtypes` names are
    converted while their shard is written.
    An older checkpoint in `folder` is replaced as a whole; other files there are kept. In memory there is
    never more than the state dict and one shard. The form is Hugging Face's own: Transformers and Accelerate
    read it.
    Raises CheckpointError, before anything is written, naming every tensor that cannot be stored; OSError
    when the disk refuses.
    """
    folder, limit, tensors = Path(folder).resolve(), parse_size(max_shard_size), dict(state_dict)
    problems = unsavable(tensors)
    if folder.exists() and not folder.is_dir():
        problems.append("this is a file; give a folder")
    if limit < 1:
        problems.append(f"max_shard_size={max_shard_size!r} leaves no room for a tensor")
    raise_all(problems, f"cannot save to {relative(folder)}:\n  ", CheckpointError, between="\n  ")
    dtypes, weight_map = dtypes or {}, {}
    aliases = {a: n for a, n in find_aliases(tensors).items() if dtypes.get(a) == dtypes.get(n) and a != "format"}
    stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    sizes = {name: tensor.numel() * dtypes.get(name, tensor.dtype).itemsize for name, tensor in stored.items()}
    uses = Counter(tensor.untyped_storage().data_ptr() for tensor in stored.values())
    del tensors, stored  # a mapping that reads files is asked again, shard by shard
    shards = plan_shards(sizes, limit)
    recover_folder(folder)
    with write_whole(folder) as partial:
        keep_other_files(folder, partial)
        for number, names in enumerate(tqdm(shards, desc="shards", unit="file", disable=None), start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            here = {alias: name for alias, name in aliases.items() if name in names}
            write_safetensors(
                {name: storable_tensor(state_dict[name], dtypes.get(name), uses) for name in names},
                partial / file, {"format": "pt", **here},
            )  # fmt: skip
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=2))
    return index


def write_safetensors(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file: eight bytes with the length of its header, the header, which is JSON, and the data.

    Spaces behind the header and odd sizes at the end let each tensor begin where memory would, at a multiple of
    ALIGNMENT, so that a view of the file computes alike: elsewhere a matrix product may add in another order, and
    differ in the last bit. (The library aligns to 8 bytes.) The tensors are as `storable_tensor` makes them.
    """
    names = sorted(tensors, key=lambda name: tensors[name].nbytes % ALIGNMENT > 0)
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header, end = {"__metadata__": metadata}, 0
    for name in names:
        dtype, shape = codes[tensors[name].dtype], list(tensors[name].shape)
        begin, end = end, end + tensors[name].nbytes
        if dtype == "F4":  # it counts numbers of four bits, PyTorch the bytes that hold two
            shape[-1] *= 2
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            stream.write(tensors[name].reshape(-1).view(torch.uint8).numpy())


def keep_other_files(folder: Path, partial: Path) -> None:
    """Start the new folder with what is in the old one, apart from its weights: a tokenizer, a config."""
    partial.mkdir()

    def weights(directory, names):
        pattern = r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX_NAME)
        return [name for name in names if Path(directory) == folder and re.fullmatch(pattern, name)]

    if folder.is_dir():
        shutil.copytree(folder, partial, ignore=weights, symlinks=True, dirs_exist_ok=True)


# --- reading it back, safely ------------------------------------------------------------------------------


def read_json(path: Path, text: bytes | None = None) -> dict:
    """Read a file that holds one JSON object, or its part `text`; a name that stands twice in it is refused."""

    def refuse_duplicates(pairs):
        counts = Counter(name for name, _ in pairs)
        raise_all([name for name in sorted(counts) if counts[name] > 1], "names stand twice: ", between=", ")
        return dict(pairs)

    try:
        value = json.loads(text if text is not None else path.read_bytes(), object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{relative(path)} is not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{relative(path)} holds a JSON {type(value).__name__}, not an object")
    return value


def read_index(index_file: Path) -> dict[str, Path]:
    """Read an index and say in which file each tensor is: tensor name -> path of its shard.

    Raises CheckpointError, with everything wrong in one message, when it is not an index, when a file it
    names is absent, or when one lies outside the index's own folder (`../`, an absolute path, a link out).
    """
    folder = Path(index_file).parent
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{relative(index_file)} has no `weight_map` from tensor names to file names")
    problems = []
    for file in sorted(set(weight_map.values())):
        try:
            if not (folder / file).resolve().is_relative_to(folder.resolve()):
                problems.append(f"{file!r} lies outside the checkpoint's folder; refused")
            elif not (folder / file).is_file() or file.endswith(".json"):
                problems.append(f"{file!r} is absent")
        except (OSError, ValueError, RuntimeError) as error:  # too long, not a name at all, a circle of links
            problems.append(f"{file!r} cannot be looked for ({error}); refused")
    raise_all(problems, f"{relative(index_file)} names files that cannot be read: ", CheckpointError)
    return {name: folder / file for name, file in weight_map.items()}


def open_shard(file: Path):
    """Open a safetensors file: its names and shapes are read now, its tensors when asked for.

    Raises CheckpointError when it is truncated or is no safetensors file.
    """
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{relative(file)} is not a whole safetensors file ({error})") from error


def read_header(file: Path) -> tuple[dict[str, dict], dict[str, str]]:
    """Read which bytes of a safetensors file hold which tensor, and the metadata beside them.

    The file begins with the header's length in eight bytes, and the header, which is JSON: for each name its
    `dtype`, `shape` and `data_offsets`, where its bytes begin and end; returned as counted from the file's start.
    Raises CheckpointError when the file is not as its header says.
    """
    with open_shard(file), Path(file).open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = read_json(file, stream.read(length))
    metadata = header.pop("__metadata__", None) or {}
    unknown = [f"{name} is {entry['dtype']}" for name, entry in header.items() if entry["dtype"] not in DTYPES]
    raise_all(unknown, f"{relative(file)} has dtypes that PyTorch has no name for: ", CheckpointError)
    for entry in header.values():
        entry["data_offsets"] = [8 + length + offset for offset in entry["data_offsets"]]
    return header, metadata


def find_checkpoint_file(checkpoint: Path) -> Path:
    """Find the file to start reading at: the index of a sharded folder, or the one file of weights.

    Pickles (`pytorch_model.bin`) count only where there is no safetensors file. Raises CheckpointError when there
    is none, or an index and a file of one kind, and so no telling which one is meant.
    """
    checkpoint = Path(checkpoint)
    if not checkpoint.is_dir():
        if checkpoint.is_file():
            return checkpoint
        raise CheckpointError(f"{relative(checkpoint)} does not exist; step 2 builds one: {rebuild_command()}")
    for name in ("model.safetensors", "pytorch_model.bin"):
        found = [file for file in (checkpoint / name, checkpoint / f"{name}.index.json") if file.is_file()]
        if len(found) == 2:
            wrong = f"has both {name} and {name}.index.json: delete the older of the two"
            raise CheckpointError(f"{relative(checkpoint)} {wrong}")
        if found:
            return found[0]
    raise CheckpointError(f"{relative(checkpoint)} has neither {INDEX_NAME} nor model.safetensors")


def tensor_files(checkpoint: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Read the headers of a safetensors checkpoint (a file, an index, or a folder), not its tensors.

    Returns the file that holds each tensor, by name, and the aliases (alias -> name) that were recorded.
    Raises CheckpointError when a shard does not hold just what the index says.
    """
    start = find_checkpoint_file(checkpoint)
    sharded = start.suffix == ".json"
    weight_map = read_index(start) if sharded else dict.fromkeys(open_shard(start).keys(), start)
    aliases, problems = {}, []
    for file in sorted(set(weight_map.values())):
        header, metadata = read_header(file)
        here, named = set(header), {name for name, its_file in weight_map.items() if its_file == file}
        problems += [f"{name} is not in {relative(file)}" for name in sorted(named - here)]
        problems += [f"{name} is in {relative(file)}, but not listed for it" for name in sorted(here - named)]
        recorded = metadata.keys() - weight_map.keys() - {"format"}
        aliases |= {alias: metadata[alias] for alias in recorded if metadata[alias] in here}
    raise_all(problems, f"{relative(start)} and its shards disagree: ", CheckpointError)
    return weight_map, aliases


def is_safetensors(start: Path) -> bool:
    """Tell whether a checkpoint's file, or all that its index names, is of safetensors; other files are pickles."""
    files = read_index(start).values() if start.suffix == ".json" else [start]
    return all(file.suffix == ".safetensors" for file in files)


def load_pt(path: Path) -> dict[str, torch.Tensor]:
    """Read the state dict in a `.pt` file, or in those of an index, without copying it, and without running code.

    A `.pt` file is a pickle, and a pickle can run any program when it is read; `weights_only=True` refuses
    everything but tensors and plain containers. With `mmap=True` the tensors are views of the file.
    Raises CheckpointError when it is truncated, would run code, or holds something other than tensors.
    """
    if Path(path).suffix == ".json":
        files = read_index(path)
        shards = {file: load_pt(file) for file in set(files.values())}
        absent = [f"{name} is not in {relative(file)}" for name, file in files.items() if name not in shards[file]]
        raise_all(absent, f"{relative(path)} and its shards disagree: ", CheckpointError)
        return {name: shards[file][name] for name, file in files.items()}
    try:
        mapped = zipfile.is_zipfile(path)  # files older than PyTorch 1.6 are not, and cannot be mapped
        state_dict = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # RuntimeError, UnpicklingError, EOFError, ...: one for each kind of damage
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            why = "it holds more than tensors, and reading that could run a program; ask for a plain state_dict"
            raise CheckpointError(f"{relative(path)} is refused: {why}") from error
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{relative(path)} is damaged or is no checkpoint ({first_line})") from error
    return only_tensors(state_dict, relative(path))


def only_tensors(state_dict, source: str) -> dict[str, torch.Tensor]:
    """Return a state dict if it is one; raises CheckpointError that names what in it is not a tensor."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(f"{source} holds a {type(state_dict).__name__}, not a state_dict")
    others = [str(name) for name, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    raise_all(others, f"{source} is no state_dict; these are not tensors: ", CheckpointError, between=", ")
    return {name: tensor.detach() for name, tensor in state_dict.items()}


# --- the lesson's checkpoint ------------------------------------------------------------------------------


def build_model(config_name: str = "tiny") -> TinyTransformerClassifier:
    """Build the seeded model of a configuration, in eval mode; the caller's random numbers go on as before."""
    if config_name not in CONFIGS or config_name == "giant":
        buildable = [name for name in CONFIGS if name != "giant"]
        raise ValueError(f"config {config_name!r} has no checkpoint; choose one of {buildable}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return TinyTransformerClassifier(**CONFIGS[config_name]).eval()


def build_checkpoint(config_name: str = "tiny", max_shard_size: int | str | None = None) -> dict:
    """Write the config, the `.pt` file and the shards of one configuration; returns the shards' index."""
    paths, model = checkpoint_paths(config_name), build_model(config_name)
    if max_shard_size is None:
        max_shard_size = "200KB" if config_name == "tiny" else "100MB"
    index = save_sharded_checkpoint(model.state_dict(), paths.shards, max_shard_size)
    with write_whole(paths.weights) as partial, partial.open("wb") as stream:
        torch.save(model.state_dict(), stream)
    with write_whole(paths.config) as partial:
        partial.write_text(json.dumps(CONFIGS[config_name], indent=2) + "\n")
    return index


def rebuild_command(config_name: str = "tiny") -> str:
    """Write the command that builds a configuration's checkpoint anew."""
    option = "" if config_name == "tiny" else f" --config {config_name}"
    return f"python step02_checkpoint/build_checkpoint.py{option}"


def load_config(path: Path) -> dict:
    """Read a model's configuration; raises CheckpointError with everything that is wrong in it."""
    config = read_json(path)
    problems = [f"{name} is missing" for name in SIZES if name not in config]
    problems += [f"{name} is unknown" for name in config if name not in SIZES]
    problems = sorted(problems) or config_problems(**config)
    raise_all(problems, f"{relative(path)} is not a model's configuration: ", CheckpointError)
    return config


def check_checkpoint(config_name: str) -> None:
    """Raise CheckpointError when a file of the checkpoint is damaged or belongs to another configuration."""
    paths = checkpoint_paths(config_name)
    config = load_config(paths.config)
    right = CONFIGS[config_name]
    wrong = [f"{name}={config[name]}, not {right[name]}" for name in right if config[name] != right[name]]
    raise_all(wrong, f"{relative(paths.config)} is not the config {config_name}: ", CheckpointError)
    load_pt(paths.weights)
    tensor_files(paths.shards)


def ensure_checkpoint(config_name: str = "tiny") -> CheckpointPaths:
    """Give the later steps a checkpoint: build it, saying so, when a part is missing; refuse a damaged one.

    Raises CheckpointError that names the damaged file and the command that rebuilds it.
    """
    paths = checkpoint_paths(config_name)
    recover_folder(paths.shards)
    missing = [path for path in (paths.config, paths.weights, paths.shards) if not path.exists()]
    if missing:
        print(f"note={relative(missing[0])} is missing: building it as step 2 does")
        build_checkpoint(config_name)
    try:
        check_checkpoint(config_name)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Build it anew: {rebuild_command(config_name)}") from error
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="tiny", choices=[name for name in CONFIGS if name != "giant"])
    parser.add_argument("--max-shard-size", help="like 100MB; the default is 200KB for tiny")
    args = parser.parse_args()
    index = build_checkpoint(args.config, args.max_shard_size)
    paths = ensure_checkpoint(args.config)
    state_dict = load_pt(paths.weights)
    shards = sorted(set(index["weight_map"].values()))
    print(f"config={relative(paths.config)}")
    print(f"checkpoint={relative(paths.weights)}")
    print(f"parameters={sum(tensor.numel() for tensor in state_dict.values())}")
    print(f"tensors={len(state_dict)}")
    print(f"first_parameter_device={next(iter(state_dict.values())).device}")
    print(f"sharded_checkpoint={relative(paths.shards)}")
    print(f"shards={len(shards)}")
    print(f"shard_bytes={index['metadata']['total_size']} ({format_bytes(index['metadata']['total_size'])})")


if __name__ == "__main__":
    run_script(main)
