"""The whole course in fifteen minutes: from twice a model's memory to less than a fifth of it.

You learn why loading the usual way needs two models' memory, and what takes that away step by step: the meta
device, a mapped file, a device map, hooks, and blocks that are read when they run. Each function of this script
only calls what a step built.
Prints the peak of four ways to load and run the same model, a plan and its run, and an answer of a real language
model if `make llm` has been run, else of `small`. Reads the checkpoint of step 2, and builds it if it is missing.
"""

import argparse

try:
    from step01_model_def.model_def import CONFIGS, fixed_sequences, format_bytes, run_script
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

import torch
from torch import nn

from notebooks import real_llm
from step02_checkpoint.build_checkpoint import INDEX_NAME, ensure_checkpoint
from step03_meta_build.meta_build import build_empty, measure_rss
from step04_to_empty_load.load_with_meta import load_mapped, load_plain, load_strict, load_to_empty
from step05_device_map.device_map import Packer, compute_module_sizes, forecast, plan_device_map, replay
from step06_hooks_offload.hooks_offload import OffloadTrace
from step07_disk_offload.disk_offload import load_checkpoint_and_dispatch, read_ahead


def budgets(config_name: str) -> dict:
    """Give the device a sixth of the model's bytes, the RAM a third, and the disk the rest."""
    size = compute_module_sizes(build_empty(config_name))[""]
    return {0: size // 6, "cpu": size // 3}


def load_offloaded(config_name: str) -> nn.Module:
    """Load with the device's budget alone; all else stays on disk, and is read when it runs."""
    model, checkpoint = build_empty(config_name), ensure_checkpoint(config_name).shards
    return load_checkpoint_and_dispatch(model, checkpoint, "auto", budgets(config_name) | {"cpu": 0})


WAYS = {
    "the usual way": load_plain,
    "meta, then to_empty": load_to_empty,
    "meta, then a mapped file": load_mapped,
    "blocks from disk": load_offloaded,
}


def load_and_run(way: str, config_name: str) -> torch.Tensor:
    """Load a model one way and run it; returns logits, (2, num_classes)."""
    model = WAYS[way](config_name)
    with torch.inference_mode():
        return model(fixed_sequences(CONFIGS[config_name]["vocab_size"]))


def measure_ways(config_name: str) -> dict[str, dict]:
    """Measure each way in a fresh process; returns what step 3's `measure_rss` says of it."""
    for name in ("tiny", config_name):
        ensure_checkpoint(name)
    setup = "from notebooks.overview import *; [load_and_run(way, 'tiny') for way in WAYS]"
    return {way: measure_rss(f"load_and_run({way!r}, {config_name!r})", setup) for way in WAYS}


def plan_and_run(config_name: str) -> tuple[Packer, OffloadTrace, bool]:
    """Run a model on device, RAM and disk at once; returns the plan's books, what happened, whether it was right."""
    model, checkpoint = build_empty(config_name), ensure_checkpoint(config_name).shards
    device_map, table = plan_device_map(model, "auto", budgets(config_name))
    packer = replay(model, device_map, table)[0]
    read_ahead(load_checkpoint_and_dispatch(model, checkpoint, device_map))
    ids = fixed_sequences(CONFIGS[config_name]["vocab_size"])  # (2, 8)
    with torch.inference_mode():
        with OffloadTrace(model) as happened:
            logits = model(ids)  # (2, num_classes)
        right = load_strict(build_empty(config_name), checkpoint)(ids)
    return packer, happened, torch.equal(logits, right)


def ask(prompt: str, budget: str) -> str:
    """Have the real language model answer under a budget; if it is not there, `small` says all that it can."""
    if not (real_llm.FOLDER / INDEX_NAME).exists():
        classes = load_and_run("blocks from disk", "small").argmax(dim=-1).tolist()  # (2,)
        return f"small sorts the two sequences into the classes {classes}; `make llm` brings a model that talks"
    folder = real_llm.ensure_model()
    model, tokenizer = real_llm.open_model(folder)
    device_map, _ = real_llm.plan(model, budget)
    inputs = real_llm.encode(tokenizer, prompt, 32)
    tokens = real_llm.answer(real_llm.ours(folder, device_map, None), inputs, 32)
    return tokenizer.decode(tokens, skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="medium", choices=["tiny", "small", "medium"])
    parser.add_argument("--prompt", default="What is the capital of France?")
    args = parser.parse_args()
    ensure_checkpoint(args.config)
    size = compute_module_sizes(build_empty(args.config))[""]
    print(f"config={args.config}")
    print(f"model_bytes={size} ({format_bytes(size)})")
    for way, growth in measure_ways(args.config).items():
        print(f"{way}: peak_mb={growth['peak_mb']:.0f} ({growth['peak_mb'] * 2**20 / size:.2f} x the model)")
    packer, happened, equal = plan_and_run(args.config)
    for device in packer.devices:
        print(f"bytes_on[{device}]={packer.used[device]} ({format_bytes(packer.used[device])})")
    print("\n".join(f"forecast_{name}={count}" for name, count in forecast(packer).items()))
    print(f"peak_resident_bytes={happened.peak_resident_bytes} ({format_bytes(happened.peak_resident_bytes)})")
    print(f"logits_equal={equal}")
    print(f"answer={ask(args.prompt, '160MiB')}")


if __name__ == "__main__":
    run_script(main)
