"""A race on one machine: the same checkpoint, map, dtype and threads, with Accelerate, with Transformers, and by hand.

You learn what offloading costs in time and memory, and how to compare without fooling yourself: every run in a
process of its own, the order rotated, cold and warm files apart, floors measured beside, outputs compared.
Prints one line a rival, and each goal with what was reached; writes `artifacts/versus/MODEL.json`. With
`--on accelerator` the blocks come from RAM or the disk to an accelerator, where the rest is.
"""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path

try:
    from step01_model_def.model_def import run_script
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

import torch
from torch import nn
from tqdm import tqdm

from step02_checkpoint.build_checkpoint import (
    ARTIFACTS, ensure_checkpoint, save_sharded_checkpoint, tensor_files, write_whole,
)  # fmt: skip
from step03_meta_build.meta_build import build_empty, init_empty_weights, warm_up
from step05_device_map.device_map import accelerators, cut_into_units, find_blocks
from step06_hooks_offload.hooks_offload import align_hooks, copy_ahead, real_device
from step07_disk_offload.disk_offload import (
    describe, load_checkpoint_and_dispatch, load_checkpoint_in_model, read_ahead,
)  # fmt: skip

# --- one model, one map -----------------------------------------------------------------------------------


def llama_config():
    """Describe a Llama of Transformers with random weights: 16 layers of 64 MiB."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16}
    return LlamaConfig(vocab_size=1000, max_position_embeddings=1024, **sizes)


def prepare(name: str) -> Path:
    """Give the sharded checkpoint of a model, built if it is missing."""
    if name != "llama":
        return ensure_checkpoint(name).shards
    folder = ARTIFACTS / "versus" / "llama"
    if not folder.exists():
        from transformers import LlamaForCausalLM

        torch.manual_seed(0)
        save_sharded_checkpoint(LlamaForCausalLM(llama_config()).state_dict(), folder)
        llama_config().save_pretrained(folder)
    return folder


def build(name: str) -> nn.Module:
    """Build a model on meta, in eval mode."""
    if name != "llama":
        return build_empty(name)
    from transformers import LlamaForCausalLM

    with init_empty_weights():
        return LlamaForCausalLM(llama_config()).eval()


def blocks_on(place: str, model: nn.Module, rest: str | int = "cpu") -> dict[str, str | int]:
    """Make the map that all rivals run: every block in one place, the rest in another."""
    blocks = find_blocks(model)
    units, _ = cut_into_units(model, blocks)
    return {key: place if unit.name in blocks else rest for unit in units for key in unit.keys}


def block_classes(model: nn.Module) -> list[str]:
    """Name the classes of the blocks, for Accelerate's `preload_module_classes`."""
    return sorted({type(block).__name__ for block in find_blocks(model).values()})


# --- the rivals -------------------------------------------------------------------------------------------
# Each takes the model's name, its checkpoint and an empty folder, and returns the model ready to run.


def resident(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Hold everything in RAM: the floor of what a forward takes."""
    load_checkpoint_in_model(model := build(name), checkpoint, {"": "cpu"})
    return model


def ours(name: str, checkpoint: Path, scratch: Path, place: str = "disk", rest: str | int = "cpu") -> nn.Module:
    """Read each block where it lies, when it runs."""
    return load_checkpoint_and_dispatch(model := build(name), checkpoint, blocks_on(place, model, rest))


def ours_read_ahead(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Read each block while the one before it computes."""
    return read_ahead(ours(name, checkpoint, scratch))


def accelerate_dat(name: str, checkpoint: Path, scratch: Path, rest: str | int = "cpu") -> nn.Module:
    """Accelerate's `load_checkpoint_and_dispatch`, which writes what is offloaded to `.dat` files first."""
    import accelerate

    model = build(name)
    options = {"offload_folder": scratch, "preload_module_classes": block_classes(model)}
    return accelerate.load_checkpoint_and_dispatch(model, str(checkpoint), blocks_on("disk", model, rest), **options)


def accelerate_safetensors(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Accelerate's `dispatch_model`, told to read safetensors in place; its resident part is loaded by hand."""
    import accelerate

    model = build(name)
    load_checkpoint_in_model(model, checkpoint, device_map := blocks_on("disk", model))
    index = {n: {"safetensors_file": str(f), "weight_name": n} for n, f in tensor_files(checkpoint)[0].items()}
    index = {n: entry | {"dtype": "float32"} for n, entry in index.items()}
    options = {"main_device": "cpu", "offload_index": index, "preload_module_classes": block_classes(model)}
    return accelerate.dispatch_model(model, device_map, **options)


def transformers_from_pretrained(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Transformers' `from_pretrained`; only for a model of its own."""
    from transformers import LlamaForCausalLM

    options = {"device_map": blocks_on("disk", build(name)), "offload_folder": scratch}
    return LlamaForCausalLM.from_pretrained(checkpoint, **options).eval()


ON_CPU = {
    "resident": resident,
    "ours": ours,
    "ours_read_ahead": ours_read_ahead,
    "accelerate_dat": accelerate_dat,
    "accelerate_safetensors": accelerate_safetensors,
    "transformers_from_pretrained": transformers_from_pretrained,
}

# The same on an accelerator. There the host's memory matters, too: pageable, pinned, or a file's.


def gpu_resident(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Hold everything on the accelerator."""
    return load_checkpoint_and_dispatch(build(name), checkpoint, {"": 0}, force_hooks=True)


def gpu_ours(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Copy each block from RAM when it runs."""
    return ours(name, checkpoint, scratch, "cpu", 0)


def gpu_ours_pinned(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Copy each block from pinned memory when it runs."""
    model = gpu_ours(name, checkpoint, scratch)
    for hook in [hook for module in model.modules() for hook in align_hooks(module)]:
        for key in hook.to_bring():
            hook.weights_map[key] = hook.weights_map[key].pin_memory()
    return model


def gpu_ours_copy_ahead(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Copy each block from RAM, through pinned memory, while the one before it computes."""
    return copy_ahead(gpu_ours(name, checkpoint, scratch))


def gpu_ours_disk(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Copy each block from its file when it runs."""
    return ours(name, checkpoint, scratch, "disk", 0)


def gpu_ours_disk_copy_ahead(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Read each block, and copy it, while the one before it computes."""
    return copy_ahead(read_ahead(gpu_ours_disk(name, checkpoint, scratch)))


def gpu_accelerate(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Accelerate's `dispatch_model` with the blocks in RAM."""
    import accelerate

    load_checkpoint_in_model(model := build(name), checkpoint, {"": "cpu"})
    options = {"main_device": 0, "preload_module_classes": block_classes(model)}
    return accelerate.dispatch_model(model, blocks_on("cpu", model, 0), **options)


def gpu_accelerate_disk(name: str, checkpoint: Path, scratch: Path) -> nn.Module:
    """Accelerate's `load_checkpoint_and_dispatch` with the blocks on disk."""
    return accelerate_dat(name, checkpoint, scratch, 0)


ON_ACCELERATOR = {
    "gpu_resident": gpu_resident,
    "gpu_ours": gpu_ours,
    "gpu_ours_pinned": gpu_ours_pinned,
    "gpu_ours_copy_ahead": gpu_ours_copy_ahead,
    "gpu_ours_disk": gpu_ours_disk,
    "gpu_ours_disk_copy_ahead": gpu_ours_disk_copy_ahead,
    "gpu_accelerate": gpu_accelerate,
    "gpu_accelerate_disk": gpu_accelerate_disk,
}

# --- one run, in a process of its own ---------------------------------------------------------------------


def forget(*folders: Path) -> None:
    """Have the system forget what it has cached of the files in these folders."""
    for file in [file for folder in folders for file in folder.rglob("*") if file.is_file()]:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_disk() -> int:
    """Count the bytes that this process has had read from the disk itself (0 where the system does not tell)."""
    counters = Path("/proc/self/io")
    text = counters.read_text() if counters.exists() else "read_bytes: 0"
    return int(text.split("read_bytes: ")[1].split()[0])


def memory() -> dict[str, int]:
    """Read this process's resident bytes, anonymous and of files (0 where the system does not tell)."""
    status = Path("/proc/self/status")
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
    return {kind: 1024 * int(fields.get(kind, "0 kB").split()[0]) for kind in ("RssAnon", "RssFile")}


class MemoryPeaks:
    """Samples, while it is entered, how far anonymous and file memory rise above what they were `before`."""

    def __init__(self, before: dict[str, int] | None = None):
        self.before, self.peaks, self.done = before or memory(), {"RssAnon": 0, "RssFile": 0}, threading.Event()

    def __enter__(self):
        self.thread = threading.Thread(target=self.keep_sampling)
        self.thread.start()
        return self

    def keep_sampling(self):
        finished = False
        while not finished:
            finished = self.done.wait(0.002)
            now = memory()
            self.peaks = {kind: max(peak, now[kind] - self.before[kind]) for kind, peak in self.peaks.items()}

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()


def run_once(rival: str, name: str, tokens: int, temperature: str) -> dict:
    """Load a model in a rival's way and run it; returns seconds, bytes, and a digest of the output.

    `temperature` is "cold" (files come from the disk), "warm", or "memory": the peaks are sampled, and no times taken.
    """
    import accelerate  # noqa: F401  before anything is timed, for all rivals

    checkpoint = prepare(name)
    build(name)  # it imports Transformers for a model of its own
    ids = torch.arange(4 * tokens).reshape(4, tokens) % 128
    warm_up()
    with tempfile.TemporaryDirectory(dir=ARTIFACTS) as folder, torch.inference_mode():
        scratch, measured = Path(folder), {}
        if temperature == "cold":
            forget(checkpoint)
        with MemoryPeaks() if temperature == "memory" else nullcontext() as peaks:
            start = time.perf_counter()
            model = (ON_CPU | ON_ACCELERATOR)[rival](name, checkpoint, scratch)
            measured["load_seconds"] = time.perf_counter() - start
        if temperature == "memory":
            measured |= {f"loading_{kind}": peak for kind, peak in peaks.peaks.items()}
        output = model(ids)
        seconds, read = [], []
        for _ in range(3):
            if temperature == "cold":
                forget(checkpoint, scratch)
            start, before = time.perf_counter(), bytes_from_disk()
            output = model(ids)  # it comes back to the CPU, where the ids are, and so has been computed
            seconds.append(time.perf_counter() - start)
            read.append(bytes_from_disk() - before)
        measured |= {"forward_seconds": statistics.median(seconds), "bytes_from_disk": statistics.median(read)}
        if temperature == "memory":
            with MemoryPeaks() as peaks:
                model(ids)
            measured |= {f"running_{kind}": peak for kind, peak in peaks.peaks.items()}
        peak = getattr(torch.get_device_module(), "max_memory_allocated", None)
        measured["device_peak_bytes"] = peak() if peak else 0
        logits = getattr(output, "logits", output)
        measured["output"] = hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]
    return measured


def read_once(name: str, temperature: str) -> dict:
    """Read the bytes of all blocks, and do nothing with them: the floor of what a forward from disk takes."""
    checkpoint, device_map = prepare(name), blocks_on("disk", build(name))
    prefixes = tuple(f"{key}." for key, place in device_map.items() if place == "disk")
    files, _ = tensor_files(checkpoint)
    ranges = [entry for file in set(files.values()) for entry in describe(file).values()]
    scratch, seconds = bytearray(2**20), []
    for _ in range(3):
        if temperature == "cold":
            forget(checkpoint)
        start = time.perf_counter()
        for entry in [entry for entry in ranges if entry["weight_name"].startswith(prefixes)]:
            with Path(entry["safetensors_file"]).open("rb", buffering=0) as stream:
                left = entry["data_offsets"][1] - stream.seek(entry["data_offsets"][0])
                while left > 0:
                    left -= stream.readinto(memoryview(scratch)[: min(left, len(scratch))])
        seconds.append(time.perf_counter() - start)
    return {"forward_seconds": statistics.median(seconds)}


def copy_once(name: str) -> dict:
    """Copy the bytes of all blocks from pinned memory to the accelerator: the floor of what a forward takes there."""
    model, device = build(name), real_device(0)
    size = sum(parameter.nbytes for block in find_blocks(model).values() for parameter in block.parameters())
    pinned = torch.empty(size, dtype=torch.uint8).pin_memory()
    there, seconds = torch.empty(size, dtype=torch.uint8, device=device), []
    for _ in range(5):
        start = time.perf_counter()
        there.copy_(pinned, non_blocking=True)
        there[-1:].cpu()  # waits for it
        seconds.append(time.perf_counter() - start)
    return {"forward_seconds": statistics.median(seconds), "bytes": size}


# --- the race ---------------------------------------------------------------------------------------------


def in_a_process(rival: str, name: str, tokens: int, temperature: str) -> dict:
    """Run a rival once in a fresh process; raises ValueError with the last line of its error."""
    job = ["--one", rival, temperature, "--config", name, "--tokens", str(tokens)]
    command = [sys.executable, "-m", "notebooks.versus_accelerate", *job]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        raise ValueError(f"{rival} failed: {(child.stderr.strip().splitlines() or ['it was killed'])[-1]}")
    return json.loads(child.stdout.splitlines()[-1])


def race(name: str, tokens: int, repetitions: int) -> dict:
    """Run all rivals, cold and warm, the order rotated; returns rival -> temperature -> medians."""
    rivals = dict.fromkeys(["raw_read", *ON_CPU], ("cold", "warm"))
    if name != "llama":
        del rivals["transformers_from_pretrained"]
    return run_all(rivals, name, tokens, repetitions)


def race_on_accelerator(name: str, tokens: int, repetitions: int) -> dict:
    """Run all rivals on the accelerator, the order rotated; returns rival -> temperature -> medians."""
    if not accelerators():
        raise ValueError("this machine has no accelerator; without `--on accelerator` the race is run on the CPU")
    rivals = {rival: ("cold", "warm") if "disk" in rival else ("warm",) for rival in ["raw_copy", *ON_ACCELERATOR]}
    return run_all(rivals, name, tokens, repetitions)


def run_all(rivals: dict[str, tuple], name: str, tokens: int, repetitions: int) -> dict:
    """Run rivals in turn, each in a process of its own; returns rival -> temperature -> medians."""
    prepare(name)
    names = list(rivals)
    turns = [names[turn % len(names) :] + names[: turn % len(names)] for turn in range(repetitions)]
    runs = [(rival, temperature) for turn in turns for rival in turn for temperature in rivals[rival]]
    runs += [(rival, "memory") for rival in rivals if rival in ON_CPU]
    measured = {}
    for rival, temperature in tqdm(runs, desc="runs", disable=None):
        measured.setdefault((rival, temperature), []).append(in_a_process(rival, name, tokens, temperature))
    results = {rival: {} for rival in rivals}
    for (rival, temperature), found in measured.items():
        results[rival][temperature] = {
            key: value if isinstance(value, str) else statistics.median(run[key] for run in found)
            for key, value in found[0].items()
        }
    return results


def machine() -> dict:
    """Describe the machine as far as it matters here."""
    ahead = sorted({int(file.read_text()) for file in Path("/sys/block").glob("*/queue/read_ahead_kb")})
    about = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "kernel": platform.release()}
    return about | {"read_ahead_kb": ahead, "torch": torch.__version__}


def goals(results: dict) -> dict[str, tuple[float, float]]:
    """Compare medians with what was aimed at: goal -> (what was reached, the limit)."""

    def seconds(rival, temperature, what="forward_seconds"):
        return results[rival][temperature][what]

    floor = max(seconds("raw_read", "cold"), seconds("resident", "warm"))
    best = "ours_read_ahead"
    return {
        "cold_forward_over_floor": (seconds(best, "cold") / floor, 1.2),
        "cold_forward_over_accelerate_dat": (seconds(best, "cold") / seconds("accelerate_dat", "cold"), 0.6),
        "cold_forward_over_accelerate_safetensors": (
            seconds(best, "cold") / seconds("accelerate_safetensors", "cold"), 0.85,
        ),
        "warm_forward_over_resident": (seconds(best, "warm") / seconds("resident", "warm"), 1.15),
        "warm_forward_over_accelerate_dat": (seconds(best, "warm") / seconds("accelerate_dat", "warm"), 0.7),
        "warm_forward_over_accelerate_safetensors": (
            seconds(best, "warm") / seconds("accelerate_safetensors", "warm"), 1.0,
        ),
        "cold_load_over_accelerate_dat": (
            seconds(best, "cold", "load_seconds") / seconds("accelerate_dat", "cold", "load_seconds"), 0.2,
        ),
    }  # fmt: skip


def goals_on_accelerator(results: dict) -> dict[str, tuple[float, float]]:
    """Compare medians with what was aimed at: goal -> (what was reached, the limit)."""
    seconds = {rival: found["warm"]["forward_seconds"] for rival, found in results.items()}
    best, floor = seconds["gpu_ours_copy_ahead"], max(seconds["raw_copy"], seconds["gpu_resident"])
    return {
        "forward_over_floor": (best / floor, 1.2),
        "forward_over_accelerate": (best / seconds["gpu_accelerate"], 1.0),
        "forward_over_pinned_without_overlap": (best / seconds["gpu_ours_pinned"], 1.0),
        "disk_forward_over_accelerate": (seconds["gpu_ours_disk_copy_ahead"] / seconds["gpu_accelerate_disk"], 1.0),
    }


def is_complete(results: dict) -> bool:
    """Tell whether every rival has all its measures."""
    wanted = {"resident", "ours", "ours_read_ahead", "accelerate_dat", "accelerate_safetensors", "raw_read"}
    runs = [run for rival in wanted for run in results[rival].values()]
    return all(run["forward_seconds"] >= 0 for run in runs) and len(runs) == 3 * len(wanted) - 1


def outputs_equal(results: dict) -> bool:
    """Tell whether all rivals gave the same numbers, bit for bit."""
    outputs = {run["output"] for found in results.values() for run in found.values() if "output" in run}
    return len(outputs) == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="medium", choices=["tiny", "small", "medium", "llama"])
    parser.add_argument("--tokens", type=int, default=64, help="of each of 4 sequences: more compute, same bytes")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--on", default="cpu", choices=["cpu", "accelerator"], help="where everything computes")
    parser.add_argument("--one", nargs=2, metavar=("RIVAL", "TEMPERATURE"), help="be one run, and print it as JSON")
    args = parser.parse_args()
    if args.one:
        rival, temperature = args.one
        if rival == "raw_read":
            measured = read_once(args.config, temperature)
        elif rival == "raw_copy":
            measured = copy_once(args.config)
        else:
            measured = run_once(rival, args.config, args.tokens, temperature)
        print(json.dumps(measured))
        return
    on_cpu = args.on == "cpu"
    results = (race if on_cpu else race_on_accelerator)(args.config, args.tokens, args.repetitions)
    for rival, found in results.items():
        for temperature, run in found.items():
            rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in run.items()}
            print(f"rival={rival} temperature={temperature}", *(f"{key}={value}" for key, value in rounded.items()))
    for name, (reached, limit) in (goals if on_cpu else goals_on_accelerator)(results).items():
        print(f"{name}={reached:.2f} limit={limit} reached={reached <= limit}")
    print(f"outputs_equal={outputs_equal(results)}")
    report = {"config": args.config, "tokens": args.tokens, "repetitions": args.repetitions, "machine": machine()}
    file = f"{args.config}_{args.tokens}.json" if on_cpu else f"{args.config}_{args.tokens}_accelerator.json"
    with write_whole(ARTIFACTS / "versus" / file) as partial:
        partial.write_text(json.dumps(report | {"results": results}, indent=2))


if __name__ == "__main__":
    run_script(main)
