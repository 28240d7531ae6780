"""Two pretend GPUs: real numbers, real refusals, and every transfer counted. Each test is a process of its own."""

import subprocess
import sys

import pytest

PRELUDE = """
import torch
from torch import nn
from notebooks import pretend_gpu
pretend_gpu.install()
from step02_checkpoint.build_checkpoint import build_model
from step04_to_empty_load.load_with_meta import named_tensors
from step05_device_map.device_map import resolve_device_map
from step06_hooks_offload.hooks_offload import *
torch.set_grad_enabled(False)
ids = torch.arange(16).reshape(2, 8)
model = build_model("tiny")
expected = model(ids)
sizes = {name: tensor.nbytes for name, tensor in named_tensors(model)}
"""


def run(code):
    result = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_pretend_devices_compute_and_refuse_to_mix():
    run("""
x, layer = torch.ones(2, 4), nn.Linear(4, 4)
right = layer(x)
assert torch.accelerator.device_count() == 2 and str(torch.accelerator.current_accelerator()) == "gpu"
weight, bias = layer.weight.to("gpu:1"), layer.bias.to("gpu:1")
assert torch.equal(nn.functional.linear(x.to("gpu:1"), weight, bias).cpu(), right)
for other in (x, x.to("gpu:0")):
    try:
        nn.functional.linear(other, weight, bias)
    except RuntimeError as error:
        assert "must be on one device" in str(error)
    else:
        raise AssertionError("mixed devices")
assert pretend_gpu.LOG[0] == ("cpu", "gpu:1", 64) and pretend_gpu.LOG[-1] == ("cpu", "gpu:0", 32)
""")


MAPS = [
    {"": 0, "encoder.layers.1": "cpu"},
    {"": 0, "encoder.layers.1": 1, "encoder.layers.2": 1, "classifier": 1},
    {"": 0, "encoder.layers.0": 1, "encoder.layers.1": "cpu", "encoder.layers.2": "disk"},
    {"": 1, "encoder": "cpu"},
    {"": "cpu", "token_embedding": 0, "position_embedding": 0},
]


@pytest.mark.parametrize("device_map", MAPS, ids=str)
def test_values_are_the_cpus_and_each_offloaded_byte_moves_once(device_map):
    run(f"""
device_map = {device_map!r}
resolved = resolve_device_map(model, device_map)
main = min(d for d in resolved.values() if isinstance(d, int))
dispatch_model(model, device_map, weights_map=dict(named_tensors(model)) if "disk" in resolved.values() else None)
resident = {{name: t for name, t in named_tensors(model) if not isinstance(t, Parked)}}
assert all(str(t.device) == f"gpu:{{resolved[name]}}" for name, t in resident.items())
for mode in (torch.no_grad, torch.inference_mode):
    pretend_gpu.LOG.clear()
    with mode():
        logits = model(ids)
    assert logits.device.type == "cpu" and torch.equal(logits, expected)
    moved = sum(size for name, size in sizes.items() if isinstance(resolved[name], str))
    log = pretend_gpu.LOG
    weights_in = [t for t in log if t.source == "cpu" and t.bytes in sizes.values() and t.bytes != ids.nbytes]
    assert sum(t.bytes for t in weights_in) == moved, (log, moved)
    assert {{t.target for t in weights_in}} <= {{f"gpu:{{main}}"}}
    last = resolved["classifier.weight"] if isinstance(resolved["classifier.weight"], int) else main
    assert [t for t in log if t.target == "cpu"] == [(f"gpu:{{last}}", "cpu", logits.nbytes)]
undispatch(model)
assert all(str(p.device) == "cpu" for p in model.parameters()) and torch.equal(model(ids), expected)
""")


def test_a_hook_that_is_missing_is_caught():
    run("""
dispatch_model(model, {"": 0, "encoder.layers.2": 1, "classifier": 1})
remove_hook_from_module(model.encoder.layers[2])
try:
    model(ids)
except RuntimeError as error:
    assert "must be on one device" in str(error)
else:
    raise AssertionError("a layer on gpu:1 took an input on gpu:0")
""")


def test_what_a_forward_changes_is_kept_though_the_device_has_a_copy():
    run("""
import copy
plain = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).train()
offloaded = dispatch_model(copy.deepcopy(plain), {"": "cpu"}, main_device=0, offload_buffers=True)
for scale, mode in ((1, torch.no_grad), (3, torch.inference_mode)):
    x = scale * torch.arange(8.0).reshape(2, 4)
    with mode():
        assert torch.equal(offloaded(x), plain(x))
for name, tensor in offloaded.state_dict().items():
    assert torch.equal(tensor, plain.state_dict()[name]), name
    assert tensor.device.type == "cpu"
""")


def test_a_tied_weight_that_is_resident_is_not_moved_and_what_was_on_the_gpu_goes_to_ram():
    run("""
tied = nn.Sequential()
tied.embedding, tied.head = nn.Embedding(128, 16), nn.Linear(16, 128, bias=False)
tied.head.weight = tied.embedding.weight
right = tied(ids)
dispatch_model(tied, {"embedding": 0, "head": "cpu"})
pretend_gpu.LOG.clear()
assert torch.equal(tied(ids), right)
assert [t for t in pretend_gpu.LOG if t.bytes == 128 * 16 * 4 and t.source == "cpu"] == []
undispatch(tied, "gpu:1")
assert tied.head.weight is tied.embedding.weight and str(tied.head.weight.device) == "gpu:1"
dispatch_model(tied, {"": "cpu"}, main_device=0)
assert all(t.device.type == "cpu" for t in tied.state_dict().values())
assert torch.equal(tied(ids), right)
""")


@pytest.mark.parametrize(
    "device_map", [MAPS[2], {"": "disk", "token_embedding": 0}, {"": "disk", "encoder": 1}], ids=str
)
def test_from_the_checkpoint_to_gpu_ram_and_disk(device_map, tmp_path):
    run(f"""
from pathlib import Path
from step02_checkpoint.build_checkpoint import save_sharded_checkpoint
from step03_meta_build.meta_build import build_empty
from step07_disk_offload.disk_offload import load_checkpoint_and_dispatch
folder, device_map = Path({str(tmp_path)!r}), {device_map!r}
save_sharded_checkpoint(model.state_dict(), folder, "200KB")
loaded = load_checkpoint_and_dispatch(build_empty("tiny"), folder, device_map)
resolved = resolve_device_map(model, device_map)
main = min(d for d in resolved.values() if isinstance(d, int))
for name, tensor in named_tensors(loaded):
    away = isinstance(resolved[name], str)
    assert isinstance(tensor, Parked) if away else str(tensor.device) == f"gpu:{{resolved[name]}}"
pretend_gpu.LOG.clear()
assert torch.equal(loaded(ids), expected)
moved = sum(size for name, size in sizes.items() if isinstance(resolved[name], str))
weights_in = [t for t in pretend_gpu.LOG if t.source == "cpu" and t.bytes in sizes.values() and t.bytes != ids.nbytes]
assert sum(t.bytes for t in weights_in) == moved
undispatch(loaded)
assert all(str(p.device) == "cpu" for p in loaded.parameters()) and torch.equal(loaded(ids), expected)
""")
