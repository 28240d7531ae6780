"""Beyond one machine: when offloading stops paying, and the same device map as a pipeline of processes.

You learn to compute what an offloaded forward must cost, and to run a map's parts in processes that each hold,
and read, only their own: `torchrun`, `torch.distributed.pipelining`, and the loader of step 7.
Prints the map, what each rank holds and took, and that the logits are those of one process. Reads the checkpoint
of step 2. It also runs as `torchrun --nproc-per-node 2 notebooks/beyond_one_machine.py`.
"""

import argparse
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

try:
    from step01_model_def.model_def import (
        CONFIGS, TinyTransformerClassifier, count_parameters, fixed_sequences, format_bytes, run_script,
    )  # fmt: skip
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from notebooks.versus_accelerate import MemoryPeaks
from step02_checkpoint.build_checkpoint import CheckpointError, ensure_checkpoint
from step03_meta_build.meta_build import build_empty, init_empty_weights, warm_up
from step04_to_empty_load.load_with_meta import load_strict
from step05_device_map.device_map import compute_module_sizes, find_blocks, forecast, plan_device_map, prefixes, replay
from step07_disk_offload.disk_offload import load_checkpoint_in_model

# --- when it pays -----------------------------------------------------------------------------------------


# Bytes per second to a GPU, and float16 operations per second (FLOPS) on it: round numbers from data sheets.
BANDWIDTHS = {"RAM over PCIe 4.0": 25e9, "NVMe disk": 5e9, "SATA disk": 0.5e9}
FLOPS = 100e12


def offloaded_bytes(config_name: str, max_memory: dict, dtype: str) -> int:
    """Plan a model with step 5, and forecast the bytes that come to the device for each forward."""
    model = build_empty(config_name)
    device_map, table = plan_device_map(model, "auto", max_memory, dtype=dtype)
    return forecast(replay(model, device_map, table, dtype=dtype)[0])["moved_bytes_per_forward"]


def tokens_per_second(moved_bytes: int, bandwidth: float, parameters: int, flops: float, batch: int) -> float:
    """Compute the most tokens per second of a model that brings `moved_bytes` for each forward.

    A forward of `batch` tokens multiplies and adds with each parameter once per token: 2 * parameters * batch
    operations, at `flops` a second. Bringing, at `bandwidth` bytes a second, may overlap it: the longer one counts.
    """
    return batch / max(moved_bytes / bandwidth, 2 * parameters * batch / flops)


def smallest_batch_that_pays(moved_bytes: int, bandwidth: float, parameters: int, flops: float) -> float:
    """Compute from how many tokens at once computing takes as long as bringing, so that offloading costs no time."""
    return moved_bytes / bandwidth * flops / (2 * parameters)


# --- one rank's part --------------------------------------------------------------------------------------


class Stage(TinyTransformerClassifier):
    """The classifier without the parts that a map puts elsewhere; what is left keeps its names.

    Takes token ids (batch, seq), or what the stage before gives (batch, seq, hidden); gives that, or logits.
    """

    def keep(self, names: list[str]) -> "Stage":
        """Drop all parts but those in the named ones, which are the keys of a map; returns the stage."""
        layers = self.encoder.layers.named_children()
        here = {n: layer for n, layer in layers if {*names} & {*prefixes(f"encoder.layers.{n}")}}
        self.encoder.layers = nn.ModuleDict(here)
        for name in ("token_embedding", "position_embedding", "classifier"):
            if not {*names} & {*prefixes(name)}:
                setattr(self, name, None)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.token_embedding is not None:
            positions = torch.arange(x.shape[1], device=x.device)  # (seq,)
            x = self.token_embedding(x) + self.position_embedding(positions)  # (batch, seq, hidden)
        for layer in self.encoder.layers.values():
            x = layer(x)  # (batch, seq, hidden)
        return x if self.classifier is None else self.classifier(x.mean(dim=1))  # (batch, num_classes)


def plan_ranks(config_name: str, ranks: int) -> dict[str, int]:
    """Plan which rank holds which part, a like share for each, as step 5 plans for GPUs.

    Raises ValueError when the model cannot be cut into that many parts.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: give 1 or more")
    model = build_empty(config_name)
    total, most = compute_module_sizes(model)[""], len(find_blocks(model)) + 2
    for count in range(min(ranks, most), 0, -1):
        device_map, _ = plan_device_map(model, "balanced", dict.fromkeys(range(count), total) | {"cpu": 0})
        used = list(device_map.values())
        if sorted({*used}) == [*range(count)] and used == sorted(used):
            break
    if count < ranks:
        raise ValueError(f"{config_name} is not cut into {ranks} parts; the most, up to there, is --ranks {count}")
    return device_map


def build_stage(config_name: str, device_map: dict[str, int], rank: int) -> Stage:
    """Build one rank's part on meta, in eval mode."""
    with init_empty_weights():
        stage = Stage(**CONFIGS[config_name]).eval()
    return stage.keep([name for name, device in device_map.items() if device == rank])


def load_stage(stage: Stage, checkpoint: Path, device: torch.device) -> Stage:
    """Read a part's own bytes from the whole checkpoint, and no others; raises CheckpointError if some are missing."""
    where = device.index if device.type != "cpu" else "cpu"
    missing = load_checkpoint_in_model(stage, checkpoint, {"": where}).missing_keys
    if missing:
        raise CheckpointError(f"the checkpoint lacks {', '.join(missing)}")
    return stage


# --- the pipeline -----------------------------------------------------------------------------------------


def device_of(rank: int, ranks: int) -> torch.device:
    """Give each rank a GPU of its own where there are enough of them, else the CPU."""
    return torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")


def run_rank(config_name: str, lost_rank: int | None = None) -> None:
    """Be one process of `torchrun`: build and load a part, run the pipeline, print what it took; compare at its end.

    Raises ValueError when another rank is gone: at once if its connection broke, else after the timeout.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device_map, checkpoint = plan_ranks(config_name, ranks), ensure_checkpoint(config_name).shards
    device = device_of(rank, ranks)
    warm_up()
    stage = build_stage(config_name, device_map, rank)
    with MemoryPeaks() as loading:
        load_stage(stage, checkpoint, device)
    print(f"rank{rank}_tensors={len(list(stage.parameters()))}")
    print(f"rank{rank}_bytes={sum(parameter.nbytes for parameter in stage.parameters())}")
    print(f"rank{rank}_anonymous_mb={loading.peaks['RssAnon'] / 2**20:.1f}", flush=True)
    ids = fixed_sequences(CONFIGS[config_name]["vocab_size"])  # (2, 8)
    try:
        dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timedelta(seconds=30))
        if rank == lost_rank:
            os._exit(1)
        schedule = ScheduleGPipe(PipelineStage(stage, rank, ranks, device), n_microbatches=len(ids))
        with torch.no_grad():
            logits = schedule.step(*[ids.to(device)] if rank == 0 else [])  # (2, num_classes), on the last rank
        dist.barrier()  # whoever is done first must not hang up on the others
    except RuntimeError as error:
        reason = re.sub(r"^\[.*?\] ", "", str(error).strip()).split(". ")[0]
        raise ValueError(f"rank {rank} lost another rank, whose own message says why ({reason})") from error
    if rank == ranks - 1:
        whole = load_strict(build_empty(config_name), checkpoint).to(device)
        with torch.no_grad():
            right = torch.cat([whole(sequence) for sequence in ids.to(device).split(1)])  # as the pipeline runs them
        print(f"logits_equal={torch.equal(logits, right)}")
    dist.destroy_process_group()


def launch(config_name: str, ranks: int, *options: str) -> list[str]:
    """Start `torchrun` on this machine; returns what the ranks printed, sorted, since they print when they like.

    Raises ValueError that names the rank that failed first; `torchrun` ends the others.
    """
    plan_ranks(config_name, ranks)
    ensure_checkpoint(config_name)  # before the ranks do, all at once
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    script = ["--nproc-per-node", str(ranks), "-m", "notebooks.beyond_one_machine", "--config", config_name, *options]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    run = subprocess.run([*torchrun, *script], capture_output=True, text=True, env=environment)
    if run.returncode:
        first = run.stderr[run.stderr.find("Root Cause") :]
        rank, code = (re.search(rf"{what}\s*: (-?\d+)", first) for what in ("rank", "exitcode"))
        what = f"rank {rank[1]} failed first, with exit code {code[1]}" if rank and code else "torchrun failed"
        said = re.findall(r"^(?:\[rank\d\]: *)?(\w*Error: .*)", run.stderr, re.MULTILINE)  # from the ranks
        said.sort(key=lambda line: "lost another rank" in line)  # reasons before consequences
        raise ValueError("; ".join([f"{what}: the pipeline was stopped", *dict.fromkeys(said)]))
    return sorted(run.stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="small", choices=["tiny", "small", "medium"])
    parser.add_argument("--ranks", type=int, default=2, help="processes; torchrun says it itself")
    parser.add_argument("--lose", type=int, metavar="RANK", help="have this rank die before its forward")
    args = parser.parse_args()
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        run_rank(args.config, args.lose)
        return
    parts = plan_ranks(args.config, args.ranks)
    if args.lose not in (None, *range(args.ranks)):
        raise ValueError(f"lose={args.lose}: the ranks are 0 to {args.ranks - 1}")
    moved = offloaded_bytes("giant", {0: "24GiB", "cpu": "512GiB"}, "float16")
    parameters = count_parameters(build_empty("giant"))
    print(f"giant_moved_bytes_per_forward={moved} ({format_bytes(moved)})")
    for name, bandwidth in BANDWIDTHS.items():
        print(f"{name}: tokens_per_second={tokens_per_second(moved, bandwidth, parameters, FLOPS, 1):.3f}", end=" ")
        print(f"smallest_batch_that_pays={smallest_batch_that_pays(moved, bandwidth, parameters, FLOPS):.0f}")
    for name, rank in parts.items():
        print(f"device_map[{name!r}]={rank}")
    print("\n".join(launch(args.config, args.ranks, *([] if args.lose is None else ["--lose", str(args.lose)]))))


if __name__ == "__main__":
    run_script(main)
