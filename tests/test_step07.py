"""Step 7: a model from its checkpoint, under any map, gives the plain model's values, or one clear error."""

import copy
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import facts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_step04 import transformers_model
from torch import nn
from torch.nn import functional as F

from step02_checkpoint import build_checkpoint as step02
from step02_checkpoint.build_checkpoint import (
    ALIGNMENT, INDEX_NAME, CheckpointError, build_model, save_sharded_checkpoint, write_safetensors,
)  # fmt: skip
from step03_meta_build.meta_build import build_empty, init_empty_weights, measure_rss
from step04_to_empty_load.load_with_meta import find_tied_parameters, named_tensors
from step05_device_map.device_map import plan_device_map
from step06_hooks_offload.hooks_offload import (
    ModelHook,
    OffloadTrace,
    Parked,
    add_hook_to_module,
    any_hook,
    dispatch_model,
    undispatch,
)  # fmt: skip
from step07_disk_offload import disk_offload as step07
from step07_disk_offload.disk_offload import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    describe,
    disk_offload,
    extract_submodules_state_dict,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_offloaded_weight,
    load_state_dict,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)

IDS = torch.arange(16).reshape(2, 8)
ALL = {"": "disk"}


def call(model, *args, **kwargs):
    with torch.inference_mode():
        return model(*args, **kwargs)


@pytest.fixture(scope="module")
def plain():
    return build_model("tiny")


@pytest.fixture(scope="module")
def expected(plain):
    return call(plain, IDS)


@pytest.fixture
def shards(plain, tmp_path):
    save_sharded_checkpoint(plain.state_dict(), tmp_path / "shards", "200KB")
    return tmp_path / "shards"


def snapshot(model):
    return [(name, id(tensor), tensor._version) for name, tensor in named_tensors(model)]


def mappings(folder):
    """Count the files of a folder that are mapped into memory (where the system tells: else it is 0)."""
    maps = Path("/proc/self/maps")
    return maps.read_text().count(f"{folder}/") if maps.exists() else 0


def files_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuses(model, checkpoint, *parts, device_map=ALL, error=CheckpointError, load=load_checkpoint_and_dispatch, **kw):
    """See one error with all these parts, a model that is as it was, and no file that was not there."""
    before, folder = snapshot(model), Path(checkpoint) if Path(checkpoint).is_dir() else Path(checkpoint).parent
    listed = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(error) as caught:
        load(model, checkpoint, device_map, **kw)
    for part in parts:
        assert part in str(caught.value), caught.value
    assert snapshot(model) == before and not any_hook(model) and not hasattr(model, "hf_device_map")
    assert sorted(path.name for path in folder.rglob("*")) == listed
    return str(caught.value)


# --- one weight


UNUSUAL = {
    "bfloat16": torch.randn(3, 2).bfloat16(), "scalar": torch.tensor(2.5), "transposed": torch.randn(2, 3).T,
    "empty": torch.zeros(0, 3), "float8": torch.randn(4).to(torch.float8_e4m3fn), "bool": torch.ones(2) > 0,
    "int64": torch.tensor([2**60, -1]), "complex64": torch.randn(2, dtype=torch.complex64), "odd": torch.ones(3) > 2,
    "nan": torch.tensor([float("nan"), -0.0]), "half": torch.randn(5).half(), "double": torch.randn(1).double(),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16), "sliced": torch.randn(4, 4)[1:3, ::2],
    "conjugate": torch.randn(2, dtype=torch.complex64).conj(), "parameter": nn.Parameter(torch.randn(2)),
    "float4": torch.arange(4, dtype=torch.uint8).view(2, 2).view(torch.float4_e2m1fn_x2),
}  # fmt: skip


def same_bits(a, b):
    a, b = (t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize("writer", ["ours", "library"])
def test_a_weight_begins_where_memory_would_whoever_wrote_the_file(tmp_path, writer):
    """Else a matrix product may add in another order: seen with one row, on a CPU with AVX-512."""
    tensors = {f"{length * 'long'}.weight": torch.randn(16, 16) for length in range(9)} | {"odd": torch.ones(3)}
    save = write_safetensors if writer == "ours" else safetensors.torch.save_file
    starts, row = [], torch.randn(1, 16)
    for name in tensors:  # a longer name makes a longer header
        file = tmp_path / f"{name[:40]}.safetensors"
        save({name: tensors[name], "last": torch.ones(3)}, file, {"format": "pt"})
        entry = describe(file)[name]
        starts.append(entry["data_offsets"][0] % ALIGNMENT)
        weight = load_offloaded_weight(file, entry)
        assert weight.data_ptr() % ALIGNMENT == 0 and torch.equal(weight, tensors[name])
        if weight.dim() == 2:
            assert torch.equal(F.linear(row, weight), F.linear(row, tensors[name]))
    assert any(starts) == (writer == "library")


@pytest.mark.parametrize("name", UNUSUAL)
def test_l4_unusual_tensors_go_to_disk_and_back_bit_for_bit(tmp_path, name):
    tensor = UNUSUAL[name]
    index = offload_weight(tensor, name, tmp_path)
    offload_state_dict(tmp_path / "all", UNUSUAL)
    save_offload_index(index, tmp_path)
    ways = [
        load_offloaded_weight(tmp_path / f"{name}.safetensors", index[name]),
        OffloadedWeightsLoader(save_folder=tmp_path / "all")[name],
        OffloadedWeightsLoader(save_folder=tmp_path)[name],
        OffloadedWeightsLoader(index=index)[name],
        OffloadedWeightsLoader(state_dict={name: tensor})[name],
    ]
    for back in ways:
        assert back.dtype == tensor.dtype and back.shape == tensor.shape and same_bits(back, tensor)


def test_l4_what_cannot_be_stored_is_refused_by_name_before_anything_is_written(tmp_path):
    wrong = {"fine": torch.ones(1), "a": torch.empty(2, dtype=torch.complex128), "b": torch.empty(1, device="meta")}
    with pytest.raises(CheckpointError, match=r"(?s)a: safetensors has no name for torch.complex128.*b: on the meta"):
        offload_state_dict(tmp_path / "folder", wrong)
    with pytest.raises(CheckpointError, match="b: on the meta device"):
        offload_weight(wrong["b"], "b", tmp_path)
    for name in ("../b", "/b", "a/b", "a\\b", "a\0"):
        with pytest.raises(CheckpointError, match="would lead out of the folder"):
            offload_weight(wrong["fine"], name, tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_an_index_grows_weight_by_weight(tmp_path):
    index = {}
    assert offload_weight(torch.ones(2), "a.b", tmp_path, index) is index
    save_offload_index(index, tmp_path)
    save_offload_index(offload_weight(torch.zeros(3), "c", tmp_path), tmp_path)
    assert {name: t.tolist() for name, t in OffloadedWeightsLoader(save_folder=tmp_path).items()} == {
        "a.b": [1, 1], "c": [0, 0, 0],
    }  # fmt: skip


def test_what_is_written_to_a_weight_does_not_reach_its_file(shards):
    stored = OffloadedWeightsLoader(save_folder=shards)
    before = files_in(shards)
    weight = stored["classifier.bias"].zero_()
    assert stored["classifier.bias"].abs().sum() > 0 and files_in(shards) == before  # nor another reader
    assert weight.abs().sum() == 0


def test_every_dtype_of_the_library_is_read(tmp_path):
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        try:
            safetensors.torch.save_file({"x": torch.empty(2, 2, dtype=dtype)}, tmp_path / "x.safetensors")
        except (KeyError, RuntimeError, safetensors.SafetensorError):
            continue
        assert step07.DTYPES[describe(tmp_path / "x.safetensors")["x"]["dtype"]] == dtype
        assert OffloadedWeightsLoader(save_folder=tmp_path / "x.safetensors")["x"].dtype == dtype


def test_a_weight_that_does_not_begin_at_a_multiple_of_its_size(tmp_path):
    values = struct.pack("<2f", 1.5, 2.5)
    entries = {"u": ("U8", [3], [0, 3]), "a": ("F32", [2], [3, 11])}
    header = {name: dict(zip(("dtype", "shape", "data_offsets"), e, strict=True)) for name, e in entries.items()}
    write_raw(tmp_path / "model.safetensors", header, b"\1\2\3" + values)
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [1.5, 2.5]


# --- mappings


def test_the_loader_is_a_mapping_that_reads_when_asked(shards, plain, monkeypatch):
    reads = []
    read = step07.load_offloaded_weight
    monkeypatch.setattr(step07, "load_offloaded_weight", lambda *args: reads.append(args) or read(*args))
    stored = OffloadedWeightsLoader({"extra": torch.ones(1), "classifier.bias": torch.full((2,), 7.0)}, shards)
    assert set(stored) == {*plain.state_dict(), "extra"} and len(stored) == 41 and "classifier.weight" in stored
    assert reads == []
    assert stored["classifier.bias"].tolist() == [7, 7] and reads == []  # what is in RAM comes first
    assert torch.equal(stored["classifier.weight"], plain.classifier.weight) and len(reads) == 1
    with pytest.raises(KeyError):
        stored["nothing"]
    with pytest.raises(ValueError, match="give a state_dict"):
        OffloadedWeightsLoader()


def test_the_loader_reads_an_index_as_accelerate_writes_it(shards, plain):
    weight_map = json.loads((shards / INDEX_NAME).read_text())["weight_map"]
    index = {
        f"model.{name}": {"safetensors_file": str(shards / file), "weight_name": name, "dtype": "float32"}
        for name, file in weight_map.items()
    }
    stored = OffloadedWeightsLoader(index=index)
    assert all(torch.equal(stored[f"model.{name}"], tensor) for name, tensor in plain.state_dict().items())


def test_a_prefixed_dataset_is_the_part_under_the_prefix():
    part = PrefixedDataset({"a.x": 1, "a.y": 2, "ab.x": 3}, "a.")
    assert dict(part) == {"x": 1, "y": 2} and len(part) == 2 and "z" not in part


def test_submodules_are_extracted_by_dotted_parts():
    names = ["layers.1.w", "layers.10.w", "layers.1", "head.w"]
    found = extract_submodules_state_dict(dict.fromkeys(names, 0), ["layers.1", "head"])
    assert list(found) == ["layers.1.w", "layers.1", "head.w"]


def test_load_state_dict_reads_every_form(shards, plain, tmp_path):
    torch.save(plain.state_dict(), tmp_path / "c.bin")
    for checkpoint in (tmp_path / "c.bin", str(shards), shards / INDEX_NAME):
        for device_map in (None, {"": "cpu"}, {"encoder": "disk", "": 0}):
            loaded = load_state_dict(checkpoint, device_map)
            assert all(torch.equal(loaded[name], t) and not loaded[name].is_meta for name, t in named_tensors(plain))
    shard = next(shards.glob("*1-of*"))
    assert load_state_dict(shard, {"": "cpu"}).keys() == describe(shard).keys()


# --- every map, every form of checkpoint


PARTS = ["token_embedding", "position_embedding", "encoder", "classifier"]
MAPS = [
    *({"": place} for place in (0, "cpu", "disk")),
    *(dict(zip(PARTS, places, strict=True)) for places in itertools.product([0, "cpu", "disk"], repeat=4)
      if len(set(places)) == 3),
    {"": "cpu", "encoder.layers.0": "disk"}, {"": "disk", "encoder.layers.1": "cpu", "classifier": 0},
    {"": 0, "encoder.layers.2": "disk"},
]  # fmt: skip


@pytest.mark.parametrize("device_map", MAPS, ids=str)
def test_every_map_gives_the_plain_models_values(shards, expected, device_map):
    model = load_checkpoint_and_dispatch(build_empty("tiny"), shards, device_map)
    for _ in range(2):
        assert torch.equal(call(model, IDS), expected)
    away = {"cpu", "disk"} if 0 in device_map.values() else {"disk"}
    for name, tensor in named_tensors(model):
        device = device_map[next(key for key in step07.prefixes(name) if key in device_map)]
        assert isinstance(tensor, Parked) == (device in away), name


@pytest.fixture(params=["pt", "bin index", "bin folder", "safetensors", "shards", "index"])
def stored(request, tmp_path, plain):
    state_dict = plain.state_dict()
    if request.param == "pt":
        torch.save(state_dict, tmp_path / "c.pt")
        return str(tmp_path / "c.pt")
    if request.param.startswith("bin"):
        names = list(state_dict)
        for number, part in enumerate((names[:20], names[20:])):
            torch.save({name: state_dict[name] for name in part}, tmp_path / f"pytorch_model-{number}.bin")
        weight_map = {name: f"pytorch_model-{number // 20}.bin" for number, name in enumerate(names)}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path if "folder" in request.param else tmp_path / "pytorch_model.bin.index.json"
    if request.param == "safetensors":
        safetensors.torch.save_file(state_dict, tmp_path / "model.safetensors")
        return tmp_path
    save_sharded_checkpoint(state_dict, tmp_path / "c", "200KB")
    return tmp_path / "c" / (INDEX_NAME if request.param == "index" else "")


@pytest.mark.parametrize("build", [lambda: build_empty("tiny"), lambda: build_model("tiny").requires_grad_(False)])
@pytest.mark.parametrize("device_map", [None, {"": 0}, ALL, {"": "disk", "encoder": "cpu", "classifier": 0}, "auto"])
def test_every_form_of_checkpoint(stored, expected, device_map, build, tmp_path):
    model = build()
    if not any(p.is_meta for p in model.parameters()):
        [p.zero_() for p in model.parameters()]
    folder = tmp_path / "offload"
    options = {"max_memory": {0: 240_000, "cpu": 425_000}, "offload_folder": folder}
    load_checkpoint_and_dispatch(model, stored, device_map, **options)
    assert torch.equal(call(model, IDS), expected)
    pickled = Path(stored).suffix in (".pt", ".json") and INDEX_NAME not in str(stored) or stored == tmp_path
    pickled = pickled and not (tmp_path / "model.safetensors").exists()
    disk = device_map is not None and "disk" in model.hf_device_map.values()
    assert folder.exists() == (pickled and disk)


def test_without_a_map_real_weights_are_filled_in_place(shards, plain):
    model = build_model("tiny")
    with torch.no_grad():
        [parameter.zero_() for parameter in model.parameters()]
    before = dict(named_tensors(model))
    assert load_checkpoint_in_model(model, shards) == ([], [])
    assert all(
        before[name] is t and torch.equal(t, dict(named_tensors(plain))[name]) for name, t in named_tensors(model)
    )


def test_the_two_parts_can_be_called_apart(shards, expected):
    device_map = {"": "cpu", "encoder.layers.1": "disk", "classifier": "disk"}
    model = build_empty("tiny")
    assert load_checkpoint_in_model(model, shards, device_map) == ([], [])
    assert model.classifier.weight.is_meta and not model.encoder.layers[0].linear1.weight.is_meta
    dispatch_model(model, device_map, weights_map=OffloadedWeightsLoader(save_folder=shards))
    assert torch.equal(call(model, IDS), expected)


def test_only_what_is_on_disk_is_there_and_it_is_let_go(shards):
    model = load_checkpoint_and_dispatch(build_empty("tiny"), shards, {"": 0, "encoder.layers.1": "disk"})
    with OffloadTrace(model) as happened:
        call(model, IDS)
    assert [event.kind for event in happened.events if event.block == "encoder.layers.1"] == [
        "bring", "run", "drop", "end",
    ]  # fmt: skip
    assert {e.source for e in happened.events if e.block == "encoder.layers.1"} == {
        "disk"
    } and happened.now == 637192 - 199936


def test_auto_plans_with_the_dtype_and_the_blocks_of_the_caller(shards, tmp_path):
    half = load_checkpoint_and_dispatch(
        build_empty("tiny"), shards, "auto", {0: 330_000}, offload_folder=tmp_path / "o", dtype="float16"
    )
    assert half.hf_device_map == {"": 0} and not any_hook(half)
    blocks = load_checkpoint_and_dispatch(
        build_empty("tiny"), shards, "sequential", {0: 637_000}, no_split_module_classes=["TransformerEncoder"]
    )
    assert blocks.hf_device_map["encoder"] == "disk"


def test_a_single_device_needs_no_hook_unless_asked(shards):
    assert not any_hook(load_checkpoint_and_dispatch(build_empty("tiny"), shards, {"": "cpu"}))
    assert any_hook(load_checkpoint_and_dispatch(build_empty("tiny"), shards, {"": "cpu"}, force_hooks=True))


def test_a_safetensors_checkpoint_is_not_rewritten(shards, expected, tmp_path):
    before = files_in(shards)
    model = load_checkpoint_and_dispatch(build_empty("tiny"), shards, ALL, offload_folder=tmp_path / "unused")
    assert torch.equal(call(model, IDS), expected)
    assert files_in(shards) == before and not (tmp_path / "unused").exists()


# --- the offload folder


def save_bin(path, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).eval()
    torch.save(model.state_dict(), path)
    return model


def empty_pair():
    with init_empty_weights():
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).eval()


X = torch.randn(3, 4, generator=torch.manual_seed(3))


def test_the_error_says_which_modules_need_an_offload_folder(tmp_path):
    save_bin(tmp_path / "c.bin", 0)
    refuses(
        empty_pair(), tmp_path / "c.bin", "1: to be read from disk", "offload_folder", device_map={"0": 0, "1": "disk"}
    )
    model = empty_pair()
    save_sharded_checkpoint(save_bin(tmp_path / "c.bin", 0).state_dict(), tmp_path / "c")
    refuses(model, tmp_path / "c", "the model: to be read from disk, but stored", "in another dtype", dtype="float16")


def test_a_folder_of_another_source_is_never_used(tmp_path):
    checkpoint, folder = tmp_path / "c.bin", tmp_path / "offload"
    one = save_bin(checkpoint, 1)
    status = checkpoint.stat()
    for _ in range(2):
        model = load_checkpoint_and_dispatch(empty_pair(), checkpoint, ALL, offload_folder=folder)
        assert torch.equal(call(model, X), call(one, X))
        written = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    load_checkpoint_and_dispatch(empty_pair(), checkpoint, ALL, offload_folder=folder)
    again = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert again == written and len(written) == 4  # used again, not written again
    two = save_bin(checkpoint, 2)  # older weights in the folder: same names, size and time
    os.utime(checkpoint, ns=(status.st_atime_ns, status.st_mtime_ns))
    model = load_checkpoint_and_dispatch(empty_pair(), checkpoint, ALL, offload_folder=folder)
    assert torch.equal(call(model, X), call(two, X)) and not torch.equal(call(two, X), call(one, X))
    half = load_checkpoint_and_dispatch(empty_pair(), checkpoint, ALL, offload_folder=folder, dtype=torch.float16)
    assert torch.equal(call(half, X.half()), call(copy.deepcopy(two).half(), X.half()))
    part = load_checkpoint_and_dispatch(empty_pair(), checkpoint, {"0": "cpu", "1": "disk"}, offload_folder=folder)
    assert torch.equal(call(part, X), call(two, X))
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_offload_folder_is_named(tmp_path):
    checkpoint, folder = tmp_path / "c.bin", tmp_path / "offload"
    one = save_bin(checkpoint, 1)
    load_checkpoint_and_dispatch(empty_pair(), checkpoint, ALL, offload_folder=folder)
    shard = next(folder.rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        load_checkpoint_and_dispatch(empty_pair(), checkpoint, ALL, offload_folder=folder)
    shutil.rmtree(folder)
    model = load_checkpoint_and_dispatch(empty_pair(), checkpoint, ALL, offload_folder=folder)
    assert torch.equal(call(model, X), call(one, X))


def test_a_checkpoint_is_never_replaced_by_an_offload(shards, tmp_path, plain):
    before = files_in(shards)
    refuses(build_empty("tiny"), shards, "holds a checkpoint", offload_folder=shards, dtype="float16")
    with pytest.raises(CheckpointError, match="holds a checkpoint"):
        disk_offload(build_model("tiny"), shards)
    assert files_in(shards) == before
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds a checkpoint"):
        offload_state_dict(tmp_path, {"a": torch.ones(1)})


def test_other_files_in_an_offload_folder_stay(tmp_path):
    one = save_bin(tmp_path / "c.bin", 1)  # as in Accelerate's own tests, the checkpoint lies in the offload folder
    model = load_checkpoint_and_dispatch(empty_pair(), tmp_path / "c.bin", ALL, offload_folder=tmp_path)
    assert torch.equal(call(model, X), call(one, X)) and (tmp_path / "c.bin").exists()


def test_two_models_share_an_offload_folder_and_neither_disturbs_the_other(tmp_path):
    models, right = [], []
    for seed in (1, 2):
        right.append(save_bin(tmp_path / "c.bin", seed))
        model = load_checkpoint_and_dispatch(empty_pair(), tmp_path / "c.bin", ALL, offload_folder=tmp_path / "o")
        models.append(model)
        models.append(disk_offload(copy.deepcopy(right[-1]), tmp_path / "o"))
        right.append(right[-1])
    for model, source in zip(models, right, strict=True):
        assert torch.equal(call(model, X), call(source, X))
    part = {"0": "cpu", "1": "disk"}
    load_checkpoint_and_dispatch(empty_pair(), tmp_path / "c.bin", part, offload_folder=tmp_path / "o")
    with pytest.raises(CheckpointError, match="missing: 0.weight"):  # the folder itself is what came last, unmixed
        disk_offload(empty_pair(), tmp_path / "o")
    disk_offload(copy.deepcopy(right[-1]), tmp_path / "o")
    weights = OffloadedWeightsLoader(save_folder=tmp_path / "o")
    assert all(torch.equal(weights[name], tensor) for name, tensor in right[-1].state_dict().items())


def test_the_offload_folder_may_be_the_current_one_and_what_is_in_it_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = Path("log.txt").open("w")  # noqa: SIM115
    model = disk_offload(one := save_bin(tmp_path / "c.bin", 1), ".")
    log.write("after")
    log.close()
    assert Path("log.txt").read_text() == "after" and Path("c.bin").exists()
    monkeypatch.chdir("/")
    assert torch.equal(call(model, X), call(save_bin(tmp_path / "c.bin", 1), X)) and one is model


def test_a_relative_path_is_the_same_file_when_the_current_folder_changes(tmp_path, monkeypatch, shards, expected):
    monkeypatch.chdir(shards.parent)
    model = load_checkpoint_and_dispatch(build_empty("tiny"), shards.name, ALL)
    monkeypatch.chdir("/")
    assert torch.equal(call(model, IDS), expected)


def test_the_checkpoint_may_lie_in_the_offload_folder(tmp_path):
    source = save_bin(tmp_path / "c.bin", 1)
    state_dict = source.state_dict()
    state_dict["0.weight"] = state_dict["0.weight"].half()
    safetensors.torch.save_file(state_dict, tmp_path / "w.safetensors")
    model = load_checkpoint_and_dispatch(empty_pair(), tmp_path / "w.safetensors", ALL, offload_folder=tmp_path)
    source[0].weight.data = source[0].weight.data.half().float()
    assert torch.equal(call(model, X), call(source, X))


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_several_writers_of_one_offload_folder(tmp_path, workers):
    state_dict = {f"{i}.weight": torch.full((200, 200), float(i)) for i in range(6)}
    torch.save(state_dict, tmp_path / "c.bin")
    code = f"""
import threading
from torch import nn
from step07_disk_offload.disk_offload import *
from step03_meta_build.meta_build import init_empty_weights
def load(wrong=[]):
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(6)))
    load_checkpoint_and_dispatch(model, {str(tmp_path / "c.bin")!r}, {{"": "disk"}}, offload_folder={str(tmp_path)!r})
    with torch.inference_mode():
        right = model(torch.ones(1, 200)).count_nonzero() == 0
    wrong.append(not right)
    return wrong
"""
    if workers == "threads":
        code += """
wrong = []
threads = [threading.Thread(target=load, args=[wrong]) for _ in range(4)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert wrong == [False] * 4, wrong
"""
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        children = [subprocess.Popen([sys.executable, "-c", code + "assert load() == [False]"]) for _ in range(3)]
        assert [child.wait(timeout=120) for child in children] == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) == 3 and not list(tmp_path.glob(".*"))


def test_the_offload_follows_the_index_the_names_and_the_dtypes(tmp_path):
    def ones(value):
        return torch.full((4, 4), float(value))

    torch.save({"0.weight": ones(1), "1.weight": ones(0)}, tmp_path / "pytorch_model-1.bin")
    torch.save({"0.weight": ones(2), "1.weight": ones(3)}, tmp_path / "pytorch_model-2.bin")
    for first, second in ((1, 2), (2, 1)):
        files = {"0.weight": f"pytorch_model-{first}.bin", "1.weight": f"pytorch_model-{second}.bin"}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
        with init_empty_weights():
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        load_checkpoint_and_dispatch(model, tmp_path, ALL, offload_folder=tmp_path / "o")
        values = [tensor.unique().tolist() for tensor in model.state_dict().values()]
        assert values == ([[1], [3]] if first == 1 else [[2], [0]])


def test_names_that_share_memory_in_a_pickle_have_each_its_own_dtype(tmp_path):
    weight = torch.randn(4, 4)
    torch.save({"0.weight": weight, "1.weight": weight, "format": weight}, tmp_path / "c.bin")

    class Named(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 4, bias=False).half(), nn.Linear(4, 4, bias=False))
            self.format = nn.Parameter(torch.zeros(4, 4))

    with init_empty_weights():
        model = Named()
    state = load_checkpoint_and_dispatch(model, tmp_path / "c.bin", ALL, offload_folder=tmp_path / "o").state_dict()
    assert torch.equal(state["1.weight"], weight) and torch.equal(state["format"], weight)
    assert torch.equal(state["0.weight"], weight.half())


def test_weights_are_offloaded_into_no_checkpoint(shards, tmp_path):
    before = files_in(shards)
    index = offload_weight(torch.ones(1), "x", tmp_path / "o")
    with pytest.raises(CheckpointError, match="holds a checkpoint"):
        save_offload_index(index, shards)
    with pytest.raises(CheckpointError, match="in files that are not in .*: token_embedding.weight, "):
        save_offload_index(OffloadedWeightsLoader(save_folder=shards).index, tmp_path / "o")
    with pytest.raises(CheckpointError, match="'model' would"):
        offload_weight(torch.ones(1), "model", tmp_path)
    assert files_in(shards) == before
    for wrong in ({"safetensors_file": str(next(shards.glob("*1-of*"))), "weight_name": "absent"},):
        with pytest.raises(CheckpointError, match="q: absent is not in"):
            OffloadedWeightsLoader(index={"q": wrong})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts mappings as Linux lists them")
def test_many_weights_of_one_file_take_no_file_handles(tmp_path):
    resource = pytest.importorskip("resource")
    tensors = {str(i): torch.full((16,), float(i)) for i in range(300)}
    write_safetensors(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limit[1]))
    try:
        weights = dict(OffloadedWeightsLoader(save_folder=tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())
    assert mappings(tmp_path) == 300
    del weights
    assert mappings(tmp_path) == 0  # and the memory is given back with them


# --- the cases


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 5)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        return self.l3(self.l2(self.l1(x)))


@pytest.mark.parametrize("form", ["shards", "bin"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("device_map", [None, ALL, {"": "cpu", "l2": "disk"}], ids=str)
def test_l1_l6_everything_wrong_is_in_one_error_and_nothing_changes(tmp_path, device, device_map, form):
    state_dict = Two().state_dict()
    state_dict |= {"l2.weight": torch.zeros(7, 4), "l1.bias": torch.zeros(9), "surplus": torch.zeros(1)}
    del state_dict["l3.bias"]
    if form == "bin":
        torch.save(state_dict, tmp_path / "c.bin")
    else:
        save_sharded_checkpoint(state_dict, tmp_path / "c", 150)
    with torch.device(device):
        model = Two()
    checkpoint = tmp_path / ("c.bin" if form == "bin" else "c")
    shapes = [
        "l2.weight is [7, 4] in",
        "the model wants [5, 4]",
        "l1.bias is [9]",
        "c.bin" if form == "bin" else "model-",
    ]
    strict = ["missing: l3.bias", "unexpected: surplus"]
    for load in (load_checkpoint_and_dispatch, load_checkpoint_in_model):
        refuses(model, checkpoint, *shapes, *strict, device_map=device_map, load=load, strict=True)
        message = refuses(model, checkpoint, *shapes, device_map=device_map, load=load, strict=False)
        assert "missing" not in message and "unexpected" not in message


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": 0, "l1": "disk"}], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_l6_strict_lists_both_and_lax_returns_both(tmp_path, device, device_map, dtype):
    state_dict = Two().state_dict() | {"surplus": torch.zeros(1)}
    del state_dict["l3.bias"]
    save_sharded_checkpoint(state_dict, tmp_path / "c", 150)
    with torch.device(device):
        model = Two()
    options = {"offload_folder": tmp_path / "o", "dtype": dtype, "load": load_checkpoint_in_model, "strict": True}
    refuses(model, tmp_path / "c", "missing: l3.bias", "unexpected: surplus", device_map=device_map, **options)
    keys = load_checkpoint_in_model(model, tmp_path / "c", device_map, tmp_path / "o", dtype)
    assert keys.missing_keys == ["l3.bias"] and keys.unexpected_keys == ["surplus"]
    on_disk = device_map is not None and "l1" in device_map
    assert model.l1.weight.is_meta == on_disk and torch.equal(
        model.l2.weight, state_dict["l2.weight"].to(dtype and torch.float16)
    )
    assert model.steps.dtype == torch.int64 and model.l3.bias.is_meta == (device == "meta")


def test_l6_a_lax_load_never_leaves_a_model_that_computes_with_nothing(tmp_path):
    state_dict = Two().state_dict()
    del state_dict["l3.bias"]
    save_sharded_checkpoint(state_dict, tmp_path / "c", 150)
    with init_empty_weights():
        model = Two()
    for device_map in (ALL, {"": "cpu", "l1": "disk"}, {"": 0}):
        refuses(model, tmp_path / "c", "the values of l3.bias", device_map=device_map, strict=False)
    refuses(model, tmp_path / "c", "the values of l3.bias", device_map=None, strict=False)
    for device_map in (ALL, {"": 0, "l3": "disk"}):  # a value of the model's own is kept in RAM
        own = Two()
        right = own.l3.bias.detach().clone()
        load_checkpoint_and_dispatch(own, tmp_path / "c", device_map, strict=False)
        assert torch.equal(own.state_dict()["l3.bias"], right)
    real = load_checkpoint_and_dispatch(Two(), tmp_path / "c", {"": "cpu", "l1": "disk"}, strict=False)
    assert call(real, torch.ones(1, 3)).isfinite().all()


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("form", ["shards", "bin"])
@pytest.mark.parametrize("meta_buffers", [False, True])
def test_l2_the_statistics_come_from_the_checkpoint(tmp_path, form, offload_buffers, meta_buffers):
    def build():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    trained = build().train()
    for scale in (1, 3, 5):
        trained(scale * torch.randn(8, 4) + 2)
    trained.eval()
    if form == "bin":
        torch.save(trained.state_dict(), tmp_path / "c.bin")
    else:
        save_sharded_checkpoint(trained.state_dict(), tmp_path / "c", 100)
    checkpoint = tmp_path / ("c.bin" if form == "bin" else "c")
    for device_map in (ALL, {"0": 0, "1": "disk", "2": "cpu"}, {"0": "disk", "1": "cpu", "2": "disk"}):
        with init_empty_weights(include_buffers=meta_buffers):
            model = build().eval()
        folder = tmp_path / "offload" if form == "bin" else None
        options = {"offload_buffers": offload_buffers, "offload_folder": folder}
        load_checkpoint_and_dispatch(model, checkpoint, device_map, **options)
        assert torch.equal(call(model, X), call(trained, X)), device_map
        back = undispatch(model).state_dict()
        assert all(torch.equal(back[name], tensor) for name, tensor in trained.state_dict().items())


def test_l3_the_empty_model_streams_from_its_shards(tmp_path):
    """800 blocks' worth of budget do not matter: what is resident, and one block, is all that RAM ever has."""
    wide = 3000  # 36 MB a weight: freed at once by the allocator
    script = f"""
from pathlib import Path
import torch
from torch import nn
from step03_meta_build.meta_build import init_empty_weights
from step07_disk_offload.disk_offload import *
def build():
    return nn.Sequential(*(nn.Linear({wide}, {wide}, bias=False) for _ in range(8))).eval()
folder = Path({str(tmp_path)!r})
with init_empty_weights():
    model = build()
    warm = nn.Sequential(nn.Linear(4, 4))
"""
    build = (
        "from step02_checkpoint.build_checkpoint import save_sharded_checkpoint\nmodel = build()\n"
        "save_sharded_checkpoint(model.state_dict(), folder / 'c', '80MB')\n"
        "torch.save(model.state_dict(), folder / 'c.bin')\n"
        f"torch.save(model(torch.ones(1, {wide})), folder / 'out.pt')\n"
    )
    subprocess.run(
        [sys.executable, "-c", script + "torch.set_grad_enabled(False)\ntorch.manual_seed(0)\n" + build], check=True
    )
    weight = wide * wide * 4 / 2**20
    device_map = "{**{str(i): 'cpu' for i in range(2)}, **{str(i): 'disk' for i in range(2, 8)}}"
    load = f"load_checkpoint_and_dispatch(model, folder / 'c', {device_map})"
    loaded = measure_rss(load, script)
    assert 1.9 * weight < loaded["peak_mb"] < 3.2 * weight, loaded["peak_mb"] / weight
    forward = f"\nwith torch.inference_mode(): out = model(torch.ones(1, {wide}))\n"
    right = "assert torch.equal(out, torch.load(folder / 'out.pt'))"
    ran = measure_rss(load + forward + right, script)
    assert ran["peak_mb"] < 3.4 * weight and ran["anonymous_mb"] < 2.2 * weight, ran
    converts = f"load_checkpoint_in_model(model, folder / 'c', {device_map}, folder / 'o', dtype='float64')"
    converted = measure_rss(converts, script)  # two resident of twice the size, one in work, and what it is made from
    assert 3.9 * weight < converted["peak_mb"] < 7.2 * weight, converted["peak_mb"] / weight


def test_l5_an_index_without_the_wrappers_prefix_is_reported_at_load(shards):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = build_empty("tiny")

        def forward(self, x):
            return self.model(x)

    refuses(Wrapper(), shards, "missing: model.classifier.bias", "unexpected: classifier.bias")
    refuses(Wrapper(), shards, "model.classifier.bias", strict=False)


class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x):
        return self.linear(x) * self.scale * self.mask + self.count


@pytest.mark.parametrize("dtype", ["float16", torch.bfloat16, torch.float64])
def test_l7_dtype_converts_floats_and_nothing_else_with_and_without_a_map(tmp_path, dtype):
    source = Kinds().eval()
    save_sharded_checkpoint(source.state_dict(), tmp_path / "c", 50)
    torch.save(source.state_dict(), tmp_path / "c.pt")
    right = copy.deepcopy(source).to(step07.to_dtype(dtype))
    maps = [None, {"": 0}, {"": "cpu"}, ALL, {"": 0, "linear": "disk"}]
    for checkpoint, device_map, build, buffers in itertools.product(
        ["c", "c.pt"], maps, ["meta", "real"], [False, True]
    ):
        with init_empty_weights() if build == "meta" else torch.device("cpu"):
            model = Kinds().eval()
        options = {"dtype": dtype, "offload_folder": tmp_path / "offload", "offload_buffers": buffers}
        load_checkpoint_and_dispatch(model, tmp_path / checkpoint, device_map, **options)
        x = X.to(step07.to_dtype(dtype))
        assert torch.equal(call(model, x), call(right, x)), (checkpoint, device_map, build)
        for name, tensor in model.state_dict().items():
            assert tensor.dtype == right.state_dict()[name].dtype and torch.equal(tensor, right.state_dict()[name])


def test_a_file_in_another_dtype_follows_the_model(tmp_path):
    half = nn.Linear(4, 4).half()
    save_sharded_checkpoint(half.state_dict(), tmp_path / "c")
    right = copy.deepcopy(half).float()
    with init_empty_weights():
        model = nn.Linear(4, 4)
    refuses(model, tmp_path / "c", "offload_folder")
    load_checkpoint_and_dispatch(model, tmp_path / "c", ALL, offload_folder=tmp_path / "o")
    assert torch.equal(call(model, X), call(right, X)) and model.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float17", "int8", "complex64", "nn"])
def test_an_unknown_dtype_is_refused_before_anything_changes(shards, dtype):
    refuses(build_empty("tiny"), shards, dtype, error=ValueError, dtype=dtype)


class Tied(nn.Module):
    def __init__(self, vocab=16, hidden=8):
        super().__init__()
        self.emb, self.mid, self.lm_head = (
            nn.Embedding(vocab, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, vocab),
        )
        self.lm_head.weight = self.emb.weight

    def forward(self, ids):
        return self.lm_head(self.mid(self.emb(ids)))


@pytest.mark.parametrize("form", ["emb only", "lm_head only", "alias", "both", "bin emb only", "bin both", "float16"])
@pytest.mark.parametrize(
    "device_map",
    [ALL, {"": "cpu"}, {"": 0}, *({"emb": e, "mid": m, "lm_head": h}
     for e, m, h in itertools.product([0, "cpu", "disk"], repeat=3) if e != h)],
    ids=lambda m: "-".join(map(str, m.values())),
)  # fmt: skip
def test_l8_l9_ties_hold_wherever_the_names_are(tmp_path, form, device_map):
    torch.manual_seed(0)
    source = Tied().eval()
    state_dict = source.state_dict()
    drop = {"emb only": "lm_head.weight", "lm_head only": "emb.weight", "bin emb only": "lm_head.weight"}.get(form)
    state_dict = {name: t.half() if form == "float16" else t for name, t in state_dict.items() if name != drop}
    if form.startswith("bin"):
        torch.save(state_dict, tmp_path / "c.bin")
    elif form == "both":
        safetensors.torch.save_file({n: t.clone() for n, t in state_dict.items()}, tmp_path / "model.safetensors")
    else:
        save_sharded_checkpoint(state_dict, tmp_path, 100)
    checkpoint = tmp_path / "c.bin" if form.startswith("bin") else tmp_path
    if form == "float16":
        source = source.half().float()
    with init_empty_weights():
        model = Tied().eval()
    folder = tmp_path / "offload"
    load_checkpoint_and_dispatch(model, checkpoint, device_map, offload_folder=folder)
    assert mappings(tmp_path) == 0  # what is resident is not a view of a file
    assert torch.equal(call(model, IDS), call(source, IDS))
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in source.state_dict().items())
    if folder.exists():
        offloaded = OffloadedWeightsLoader(save_folder=folder)
        assert len({"emb.weight", "lm_head.weight"} & set(offloaded)) <= 1  # written once
    undispatch(model)
    assert find_tied_parameters(model) == [["emb.weight", "lm_head.weight"]]
    assert torch.equal(call(model, IDS), call(source, IDS))


def test_names_with_different_values_are_refused_for_a_tied_model(tmp_path):
    state_dict = Tied().state_dict() | {"lm_head.weight": torch.zeros(16, 8)}
    save_sharded_checkpoint(state_dict, tmp_path / "c")
    refuses(Tied(), tmp_path / "c", "tied: emb.weight, lm_head.weight")


def test_an_alias_fills_an_untied_model_with_two_copies(tmp_path):
    save_sharded_checkpoint(Tied().state_dict(), tmp_path / "c")
    untied = Tied()
    untied.lm_head.weight = nn.Parameter(torch.zeros(16, 8))
    load_checkpoint_and_dispatch(untied, tmp_path / "c", {"": "cpu"})
    assert torch.equal(untied.lm_head.weight, untied.emb.weight)
    with torch.no_grad():
        untied.emb.weight.zero_()
    assert untied.lm_head.weight.abs().sum() > 0


@pytest.mark.parametrize("form", ["shards", "bin"])
def test_h6_back_to_an_ordinary_model_from_disk(tmp_path, plain, expected, form):
    if form == "bin":
        torch.save(plain.state_dict(), tmp_path / "c.bin")
    else:
        save_sharded_checkpoint(plain.state_dict(), tmp_path / "c")
    checkpoint = tmp_path / ("c.bin" if form == "bin" else "c")
    model = load_checkpoint_and_dispatch(build_empty("tiny"), checkpoint, ALL, offload_folder=tmp_path / "o")
    call(model, IDS)
    undispatch(model)
    for path in [*tmp_path.rglob("*.safetensors"), *tmp_path.glob("*.bin")]:
        path.write_bytes(b"gone")  # the model has nothing to do with its files any more
    assert torch.equal(call(model, IDS), expected) and not any_hook(model)
    assert not any(isinstance(t, Parked) or t.is_meta for _, t in named_tensors(model))
    assert all(type(p) is nn.Parameter and p.requires_grad for p in model.parameters())
    model.to(torch.float64)


def test_h11_no_split_modules_of_the_model_are_respected(tmp_path):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.b(self.a(x))

    class Model(nn.Module):
        _no_split_modules = ["Block"]

        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = Block(), Block(), Block()

        def forward(self, x):
            return self.three(self.two(self.one(x)))

    real = Model().eval()
    save_sharded_checkpoint(real.state_dict(), tmp_path / "c")
    with init_empty_weights():
        model = Model().eval()
    load_checkpoint_and_dispatch(model, tmp_path / "c", "auto", max_memory={0: 1300, "cpu": 0})
    assert model.hf_device_map == {"one": 0, "two": "disk", "three": "disk"}
    x = torch.randn(2, 8)
    with OffloadTrace(model) as happened:
        assert torch.equal(call(model, x), call(real, x))
    assert [event.block for event in happened.events if event.kind == "run" and event.bytes] == ["two", "three"]


@pytest.mark.parametrize("real", [True, False])
def test_disk_offload(tmp_path, plain, expected, real):
    folder = tmp_path / "offload"
    if not real:
        save_sharded_checkpoint(plain.state_dict(), folder)
    model = disk_offload(build_model("tiny") if real else build_empty("tiny"), folder)
    assert torch.equal(call(model, IDS), expected)
    assert all(isinstance(tensor, Parked) for _, tensor in named_tensors(model))
    with OffloadTrace(model) as happened:
        call(model, IDS)
    assert {event.source for event in happened.events if event.bytes} == {"disk"} and happened.now == 0
    again = disk_offload(undispatch(model), tmp_path / "again" if not real else folder)
    assert torch.equal(call(again, IDS), expected)


def test_disk_offload_of_a_tied_model_with_buffers(tmp_path):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).eval()
    model[2].weight = model[1].weight
    right = call(copy.deepcopy(model), X)
    for number, buffers in enumerate((False, True)):
        ours = disk_offload(copy.deepcopy(model), tmp_path / str(number), offload_buffers=buffers)
        assert torch.equal(call(ours, X), right)
        assert isinstance(ours[0].running_mean, Parked) == buffers
        assert len(OffloadedWeightsLoader(save_folder=tmp_path / str(number))) == 6 if buffers else 3
    with pytest.raises(CheckpointError, match="does not exist"):
        disk_offload(build_empty("tiny"), tmp_path / "nowhere")


def test_a_copy_and_a_pickle_of_a_model_on_disk(shards, expected, tmp_path):
    model = load_checkpoint_and_dispatch(build_empty("tiny"), shards, ALL)
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(call(twin, IDS), expected) and torch.equal(call(loaded, IDS), expected)
    state = model.state_dict()
    assert torch.equal(call(loaded, IDS), expected) and not any(t.is_meta for t in state.values())


# --- bad input


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def truncate(folder):
    shard = next(folder.glob("*2-of*"))
    shard.write_bytes(shard.read_bytes()[:-10])
    return shard.name


def garbage(folder):
    shard = next(folder.glob("*2-of*"))
    shard.write_bytes(b"\x99" * 5000)
    return shard.name


def remove_shard(folder):
    shard = next(folder.glob("*2-of*"))
    shard.unlink()
    return shard.name


def claims_more(folder):
    shard = next(folder.glob("*2-of*"))
    header = {"classifier.weight": {"dtype": "F32", "shape": [2, 64], "data_offsets": [0, 512]}}
    write_raw(shard, header, b"\0" * 100)
    return shard.name


def duplicate_names(folder):
    shard = next(folder.glob("*2-of*"))
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    write_raw(shard, b"{" + entry + b"," + entry + b"}", b"\0" * 4)
    return "stand twice"


def duplicate_in_index(folder):
    (folder / INDEX_NAME).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    return "stand twice"


def not_json(folder):
    (folder / INDEX_NAME).write_text("{nonsense")
    return INDEX_NAME


def leads_out(place):
    def change(folder):
        index = json.loads((folder / INDEX_NAME).read_text())
        outside = folder.parent / "outside.safetensors"
        shutil.copy(next(folder.glob("*1-of*")), outside)
        if place == "link":
            (folder / "link.safetensors").symlink_to(outside)
        names = {"link": "link.safetensors", "up": "../outside.safetensors", "absolute": str(outside)}
        index["weight_map"]["classifier.bias"] = names[place]
        (folder / INDEX_NAME).write_text(json.dumps(index))
        return "lies outside the checkpoint's folder"

    return change


def older_single_file(folder):
    shutil.copy(next(folder.glob("*1-of*")), folder / "model.safetensors")
    return "delete the older of the two"


def unknown_dtype(folder):
    shard = next(folder.glob("*2-of*"))
    write_raw(shard, {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, b"\0" * 3)
    return "a is F6_E2M3"


def empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    return "neither"


@pytest.mark.parametrize(
    "damage",
    [truncate, garbage, remove_shard, claims_more, duplicate_names, duplicate_in_index, not_json, leads_out("link"),
     leads_out("up"), leads_out("absolute"), older_single_file, unknown_dtype, empty_folder],
)  # fmt: skip
@pytest.mark.parametrize("device_map", [None, ALL, {"": "cpu"}], ids=str)
def test_a_damaged_checkpoint_is_one_clear_error(shards, damage, device_map):
    part = damage(shards)
    for model in (build_empty("tiny"), build_model("tiny")):
        refuses(model, shards, part, device_map=device_map)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "code"])
def test_a_damaged_pickle_is_one_clear_error_and_runs_nothing(tmp_path, damage):
    path = tmp_path / "c.bin"
    save_bin(path, 0)
    if damage == "code":
        torch.save({"weight": print}, path)
    else:
        path.write_bytes(path.read_bytes()[:200] if damage == "truncated" else b"x" * 300)
    refuses(empty_pair(), path, "c.bin", offload_folder=tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("how", ["deleted", "replaced", "truncated", "touched"])
def test_a_file_that_changes_while_the_model_runs_is_named(shards, expected, how):
    model = load_checkpoint_and_dispatch(build_empty("tiny"), shards, {"": "disk", "encoder.layers.0": "cpu"})
    assert torch.equal(call(model, IDS), expected)
    kept = {path: path.read_bytes() for path in shards.iterdir()}
    times = {path: path.stat() for path in shards.iterdir()}
    for path in shards.glob("*.safetensors"):
        if how in ("deleted", "replaced"):
            path.unlink()
        if how in ("replaced", "truncated"):
            path.write_bytes(kept[path][: -100 if how == "truncated" else None])
        if how == "touched":
            os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="cannot read .*weight: .*safetensors has changed or is gone"):
        call(model, IDS)
    assert all(isinstance(t, Parked) for n, t in named_tensors(model) if "layers.0" not in n)
    if how == "touched":  # as it was again, the model runs again
        for path, status in times.items():
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert torch.equal(call(model, IDS), expected)


def test_a_full_disk_while_offloading_leaves_nothing(tmp_path, monkeypatch):
    save_bin(tmp_path / "c.bin", 0)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    for step in (step02, step07):
        monkeypatch.setattr(step, "write_safetensors", full)
    folder = tmp_path / "o"
    folder.mkdir()
    refuses(empty_pair(), tmp_path / "c.bin", "No space left", "Free some space", error=OSError, offload_folder=folder)
    model = nn.Linear(2, 2)
    before = snapshot(model)
    with pytest.raises(OSError, match="No space left"):
        disk_offload(model, folder)
    assert snapshot(model) == before and not any_hook(model) and not list(folder.iterdir())


def test_a_hostile_index_is_refused(shards):
    names = {"w": INDEX_NAME, "x": "\ud800.safetensors", "y": "a" * 300 + ".safetensors", "z": "loop"}
    (shards / "loop").symlink_to(shards / "loop")
    for name, file in names.items():
        (shards / INDEX_NAME).write_text(json.dumps({"weight_map": {name: file}}))
        refuses(build_empty("tiny"), shards, INDEX_NAME)


def stop_at(monkeypatch, reads):
    """Have the user press Ctrl-C at the read of this number; returns the list that counts them."""
    read, count = step07.load_offloaded_weight, []

    def stops(*args):
        count.append(1)
        if len(count) == reads:
            raise KeyboardInterrupt
        return read(*args)

    monkeypatch.setattr(step07, "load_offloaded_weight", stops)
    return count


def test_whatever_stops_a_load_leaves_the_model_as_it_was(shards, monkeypatch):
    count = stop_at(monkeypatch, 60)
    for model in (build_empty("tiny"), build_model("tiny")):
        count.clear()
        refuses(model, shards, device_map={"": "cpu", "classifier": "disk"}, error=KeyboardInterrupt)
    monkeypatch.undo()

    def fails_late(model, *args, **options):
        dispatch_model(model, *args, **options)
        raise ZeroDivisionError

    monkeypatch.setattr(step07, "dispatch_model", fails_late)
    model = build_empty("tiny")
    hook = add_hook_to_module(model.classifier, ModelHook())._hf_hook
    refuses(model, shards, error=ZeroDivisionError)
    assert model.classifier._hf_hook is hook and "_hf_hook" not in vars(model.encoder)
    refuses(build_model("tiny"), shards, error=ZeroDivisionError)


def test_a_real_model_that_is_filled_in_place_is_filled_wholly_or_not(shards, monkeypatch):
    model = build_model("tiny")
    with torch.no_grad():
        [parameter.zero_() for parameter in model.parameters()]
    stop_at(monkeypatch, 70)
    with pytest.raises(KeyboardInterrupt):
        load_checkpoint_in_model(model, shards)
    assert all(parameter.count_nonzero() == 0 for parameter in model.parameters())


def test_inside_other_contexts_the_model_is_real_and_may_be_trained(shards, expected):
    for device_map in (None, {"": "cpu"}, ALL):
        with init_empty_weights(include_buffers=True), torch.inference_mode():
            model = load_checkpoint_and_dispatch(build_empty("tiny"), shards, device_map)
        assert torch.equal(call(model, IDS), expected), device_map
        if device_map != ALL:
            model(IDS).sum().backward()
            assert model.classifier.weight.grad is not None


def test_real_buffers_that_no_checkpoint_holds_are_offloaded_to_ram(tmp_path):
    def build():
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].register_buffer("table", torch.full((4,), 3.0), persistent=False)
        return model.eval()

    save_sharded_checkpoint((source := build()).state_dict(), tmp_path / "c")
    with init_empty_weights():
        model = build()
    load_checkpoint_and_dispatch(model, tmp_path / "c", ALL, offload_buffers=True)
    assert isinstance(model[0].table, Parked) and torch.equal(call(model, X), call(source, X))
    assert undispatch(model)[0].table.tolist() == [3, 3, 3, 3]


def test_resident_weights_have_the_models_strides(tmp_path):
    torch.manual_seed(0)
    torch.save({"weight": torch.randn(64, 64).T}, tmp_path / "c.pt")
    with init_empty_weights():
        model = nn.Linear(64, 64, bias=False)
    load_checkpoint_and_dispatch(model, tmp_path / "c.pt", {"": "cpu"})
    assert model.weight.stride() == (64, 1) and torch.equal(model.weight, torch.load(tmp_path / "c.pt")["weight"])


def test_disk_offload_of_a_model_without_weights(tmp_path):
    assert call(disk_offload(nn.ReLU(), tmp_path), -torch.ones(1)).item() == 0


def test_a_dispatched_model_is_not_loaded_into(shards, expected):
    model = load_checkpoint_and_dispatch(build_empty("tiny"), shards, ALL)
    for load in (load_checkpoint_and_dispatch, load_checkpoint_in_model):
        with pytest.raises(ValueError, match=r"undispatch\(model\) first"):
            load(model, shards, ALL)
    with pytest.raises(ValueError, match=r"undispatch\(model\) first"):
        disk_offload(model, shards.parent / "o")
    assert torch.equal(call(model, IDS), expected) and not (shards.parent / "o").exists()


def test_maps_that_cannot_be_honoured_are_refused(shards):
    for device_map, part in [
        ({"encoder": "disk"}, "classifier.weight has no device"), ({"": 99}, "device 99 does not exist here"),
        ({"": "nowhere"}, "is not a device"), ({"": "disk", "ghost": 0}, "'ghost' names nothing"),
        ({"": "disk", "encoder.layers.0.linear1.weight": 0}, "must be on one device"),
    ]:  # fmt: skip
        refuses(build_empty("tiny"), shards, part, device_map=device_map, error=ValueError)
    with pytest.raises(ValueError, match="'automatic' is unknown"):
        load_checkpoint_and_dispatch(build_empty("tiny"), shards, "automatic")


def test_a_meta_buffer_that_no_checkpoint_holds_is_refused(tmp_path):
    def build():
        model = nn.Sequential(nn.Linear(2, 2))
        model.register_buffer("table", torch.ones(2), persistent=False)
        return model

    save_sharded_checkpoint(build().state_dict(), tmp_path / "c")
    with init_empty_weights(include_buffers=True):
        model = build()
    for strict in (True, False):
        refuses(model, tmp_path / "c", "not filled: table", strict=strict)


# --- reading ahead


class Spied:
    """Note what is asked to be read, by the block that runs when it is asked."""

    def __init__(self, monkeypatch):
        self.asked = []
        monkeypatch.setattr(step07, "read_soon", lambda *range_: self.asked.append(range_))

    def bytes(self):
        return sum(end - begin for _, begin, end in self.asked)


def chain(tmp_path, names="abcd"):
    """Build a model whose blocks run in the order that the input names, and load it wholly on disk."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in names)

        def forward(self, x, order):
            for name in order:
                x = self.blocks[names.index(name)](x)
            return x

    torch.manual_seed(0)
    source = Chain().eval()
    save_sharded_checkpoint(source.state_dict(), tmp_path / "chain")
    with init_empty_weights():
        model = Chain().eval()
    return step07.read_ahead(load_checkpoint_and_dispatch(model, tmp_path / "chain", ALL)), source


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be asked to read ahead")
def test_h13_the_order_is_learnt_from_what_ran(tmp_path, monkeypatch):
    spied = Spied(monkeypatch)
    model, source = chain(tmp_path)
    blocks = {name: model.blocks[i]._hf_hook.hooks[-1].block for i, name in enumerate("abcd")}

    def asked(order):
        spied.asked.clear()
        assert torch.equal(call(model, X, order), call(source, X, order))
        left = list(spied.asked)
        found = ""
        while left:
            name = next(name for name, block in blocks.items() if left[: len(block)] == list(block))
            left, found = left[len(blocks[name]) :], found + name
        return found

    assert asked("abcd") == "bcda"  # at first as they are defined, and around for the next token
    assert asked("dbca") == "dcdb"  # every guess is wrong, every value right
    assert asked("dbca") == "bcad"
    assert asked("dba") == "bcd"  # c is skipped: it was asked for in vain
    assert asked("dba") == "bad"
    assert asked("ad") == "ab"


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be asked to read ahead")
def test_each_offloaded_byte_is_asked_for_once_a_forward(shards, expected, monkeypatch):
    spied = Spied(monkeypatch)
    device_map = {"": 0, "encoder.layers.0": "cpu", "encoder.layers.1": "disk", "encoder.layers.2": "disk"}
    model = step07.read_ahead(load_checkpoint_and_dispatch(build_empty("tiny"), shards, device_map))
    for _ in range(3):
        spied.asked.clear()
        assert torch.equal(call(model, IDS), expected) and spied.bytes() == 2 * 199936
    assert torch.equal(call(undispatch(model), IDS), expected) and not any_hook(model)


def test_reading_ahead_changes_no_values_whatever_happens(shards, expected, monkeypatch):
    model = step07.read_ahead(load_checkpoint_and_dispatch(build_empty("tiny"), shards, ALL))
    with pytest.raises(IndexError):
        call(model, IDS + 1000)  # a forward that raises
    assert torch.equal(call(model, IDS), expected)
    twin = copy.deepcopy(model)
    threads, right = [], []
    for each in (model, model, twin, twin):
        threads.append(threading.Thread(target=lambda m=each: right.append(torch.equal(call(m, IDS), expected))))
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert right == [True] * 4
    monkeypatch.delattr(os, "posix_fadvise", raising=False)  # as on macOS and Windows
    elsewhere = step07.read_ahead(load_checkpoint_and_dispatch(build_empty("tiny"), shards, ALL))
    assert torch.equal(call(elsewhere, IDS), expected)
    assert torch.equal(call(step07.read_ahead(build_model("tiny")), IDS), expected)  # nothing to read


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be asked to read ahead")
def test_a_file_that_is_gone_is_named_by_the_read_and_not_by_the_hint(shards):
    model = step07.read_ahead(load_checkpoint_and_dispatch(build_empty("tiny"), shards, ALL))
    for path in shards.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match="has changed or is gone"):
        call(model, IDS)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux says what is cached")
@pytest.mark.parametrize("begun", [False, True])
def test_what_is_asked_for_is_soon_cached(tmp_path, monkeypatch, begun):
    path = tmp_path / "f"
    path.write_bytes(os.urandom(2**22))

    def cached(stream):
        try:
            return sum(os.preadv(stream.fileno(), [bytearray(1)], at, os.RWF_NOWAIT) for at in range(0, 2**22, 2**16))
        except BlockingIOError:
            return 0

    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if cached(stream):
            pytest.skip("this file system keeps files in memory")
        if begun:  # as when the block before it was read, and the system went on a little
            stream.read(1)
        device = path.stat().st_dev
        window = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb")
        small = window.exists() and int(window.read_text()) <= 512
        asked, ask = [], os.posix_fadvise
        monkeypatch.setattr(os, "posix_fadvise", lambda *args: (asked.append(args[1]), ask(*args)))
        step07.read_soon(str(path), 0, 2**22)
        assert len(asked) == 32 or not small  # a question alone makes the system read a window
        deadline = time.monotonic() + 20
        while not cached(stream) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert cached(stream) == 64
    monkeypatch.setattr(os, "posix_fadvise", None)  # nothing is asked for that is there
    step07.read_soon(str(path), 0, 2**22)


# --- a writer that is killed


WRITER = """
import sys, torch
from pathlib import Path
from torch import nn
from step07_disk_offload.disk_offload import *
folder = Path(sys.argv[1])
print("ready", flush=True)
while True:
    for value in (1.0, 2.0):
        weights = {f"w{i}": torch.full((300, 300), value) for i in range(8)}
        WRITE
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the writers from one process that has imported PyTorch")
@pytest.mark.parametrize(
    "write",
    ["save_sharded_checkpoint(weights, folder, '800KB')", "offload_state_dict(folder, weights)"],
    ids=["checkpoint", "offload"],
)
def test_killed_50_times_the_old_or_the_new_checkpoint_is_whole(tmp_path, write):
    from step02_checkpoint.build_checkpoint import recover_folder

    folder = tmp_path / "c"
    code = WRITER.replace("WRITE", write)
    seen = set()
    # One process is forked per kill from a warm parent: importing PyTorch 50 times would take minutes.
    code = code.replace(
        "while True:", "import os, random, signal, time\nfor kill in range(50):\n  pid = os.fork()\n  while pid == 0:"
    )
    body, tail = code.split("  while pid == 0:\n")
    tail = "".join(f"  {line}\n" for line in tail.splitlines())
    code = (
        body
        + "  while pid == 0:\n"
        + tail
        + (
            "  time.sleep(random.Random(kill).uniform(0.005, 0.2))\n"
            "  os.kill(pid, signal.SIGKILL)\n  os.waitpid(pid, 0)\n  print(kill, flush=True)\n  input()\n"
        )
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    for kill in range(50):
        assert child.stdout.readline() == f"{kill}\n"
        recover_folder(folder)
        if folder.exists():
            weights = dict(OffloadedWeightsLoader(save_folder=folder))
            values = {value for tensor in weights.values() for value in tensor.unique().tolist()}
            assert len(weights) == 8 and len(values) == 1, "neither the old nor the new one"
            seen |= values
            del weights
        child.stdin.write("\n")
        child.stdin.flush()
    assert child.wait(timeout=30) == 0 and seen == {1.0, 2.0}
    save_sharded_checkpoint({"w": torch.ones(1)}, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]  # and the next writer sweeps up


# --- fuzzed files


def good_file():
    return {"w": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3, dtype=torch.int16), "s": torch.tensor(True)}


def opens_right_or_is_refused(path):
    """Open a file that may be damaged: an error of ours, or what the library reads from it."""
    try:
        stored = OffloadedWeightsLoader(save_folder=path)
        values = {name: tensor.clone() for name, tensor in stored.items()}
    except CheckpointError:
        return
    library = safetensors.torch.load_file(path)
    assert values.keys() == library.keys()
    assert all(values[n].shape == library[n].shape and same_bits(values[n], library[n]) for n in values)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_fuzzed_file_is_read_right_or_refused(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        content = bytearray(safetensors.torch.save(good_file(), {"format": "pt"}))
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            kind = data.draw(st.sampled_from(["flip", "cut", "insert", "length"]))
            if kind == "flip":
                content[at] = data.draw(st.integers(0, 255))
            elif kind == "cut":
                del content[at : at + data.draw(st.integers(1, 40))]
            elif kind == "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=20))
            else:
                content[:8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
            content = content or bytearray(b"\0")
        path.write_bytes(content)
        opens_right_or_is_refused(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "I16", "BOOL", "F4", "F6_E2M3", "F8_E8M0", "C64", "NONE", "", 3]) | JSON,
        "shape": st.lists(st.integers(-1, 4) | st.just(2**63), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40) | st.just(2**63), min_size=2, max_size=2) | JSON,
        "more": JSON,
    },
)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(header=st.dictionaries(st.sampled_from(["w", "b", "", "__metadata__"]), ENTRY | JSON, max_size=3) | JSON,
       data=st.binary(max_size=48))  # fmt: skip
def test_a_made_up_header_is_read_right_or_refused(header, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        write_raw(path, header, data)
        opens_right_or_is_refused(path)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(index=st.fixed_dictionaries({}, optional={
    "weight_map": st.dictionaries(
        st.sampled_from(["w", "b", "s", "x", ""]),
        st.sampled_from(["a.safetensors", "../a.safetensors", "/etc/passwd", "b.safetensors", "", ".", "\0",
                         "x/../a.safetensors"])
        | JSON, max_size=4) | JSON,
    "metadata": JSON,
}) | JSON)  # fmt: skip
def test_a_made_up_index_is_read_right_or_refused(index):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / INDEX_NAME
        safetensors.torch.save_file(good_file(), path.parent / "a.safetensors")
        path.write_text(json.dumps(index))
        try:
            stored = OffloadedWeightsLoader(save_folder=path.parent)
            values = {name: tensor.clone() for name, tensor in stored.items()}
        except CheckpointError:
            return
        assert values.keys() == good_file().keys() or not values
        assert all(same_bits(values[name], good_file()[name]) for name in values)


# --- beside the big libraries


TRANSFORMERS_MAPS = {"all on disk": ALL, "all in RAM": {"": "cpu"}, "all on the device": {"": 0}, "planned": None}


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "T5"])
@pytest.mark.parametrize("places", [*TRANSFORMERS_MAPS, "mixed"])
@pytest.mark.parametrize("ours", [True, False], ids=["our checkpoint", "save_pretrained"])
def test_transformers_models_generate_token_for_token(tmp_path, name, places, ours):
    torch.manual_seed(0)
    source, inputs = transformers_model(name)
    if ours:
        save_sharded_checkpoint(source.state_dict(), tmp_path, "20KB")
    else:
        source.save_pretrained(tmp_path, max_shard_size="20KB")
    with init_empty_weights():
        model = type(source)(source.config).eval()
    model.tie_weights()
    device_map = TRANSFORMERS_MAPS.get(places)
    total = sum(p.nbytes for p in source.parameters())
    if places == "planned":
        device_map, _ = plan_device_map(model, "sequential", {0: total * 2 // 3, "cpu": total // 3})
    elif places == "mixed":
        blocks = [*step07.prefixes("x")[:0], *sorted(find_block_names(model))]
        device_map = {"": "cpu"} | {block: ("disk", 0)[i % 2] for i, block in enumerate(blocks)}
    load_checkpoint_and_dispatch(model, tmp_path, device_map)
    with torch.inference_mode():
        assert torch.equal(model(**inputs).logits, source(**inputs).logits)
        if hasattr(source, "generate") and name != "Bert":
            options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            ids = inputs["input_ids"]
            assert torch.equal(model.generate(ids, **options), source.generate(ids, **options))
    undispatch(model)
    assert find_tied_parameters(model) == find_tied_parameters(source)
    with torch.inference_mode():
        assert torch.equal(model(**inputs).logits, source(**inputs).logits)


def find_block_names(model):
    from step05_device_map.device_map import find_blocks

    return find_blocks(model)


def test_from_pretrained_reads_what_our_offloaded_model_saves(tmp_path):
    source, inputs = transformers_model("Llama")
    source.save_pretrained(tmp_path / "a")
    with init_empty_weights():
        model = type(source)(source.config).eval()
    model.tie_weights()
    load_checkpoint_and_dispatch(model, tmp_path / "a", ALL)
    save_sharded_checkpoint(model.state_dict(), tmp_path / "b", "10KB")
    shutil.copy(tmp_path / "a" / "config.json", tmp_path / "b")
    again = type(source).from_pretrained(tmp_path / "b").eval()
    with torch.inference_mode():
        assert torch.equal(again(**inputs).logits, source(**inputs).logits)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["200KB", "10MB"])
def test_we_read_what_accelerate_saves(tmp_path, plain, expected, safe, size):
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator().save_model(build_model("tiny"), tmp_path / "c", size, safe_serialization=safe)
    device_map = {"": "disk", "encoder.layers.0": "cpu", "classifier": 0}
    model = load_checkpoint_and_dispatch(
        build_empty("tiny"), tmp_path / "c", device_map, offload_folder=tmp_path / "o"
    )
    assert torch.equal(call(model, IDS), expected)


def test_accelerate_runs_what_we_save(tmp_path, plain, expected, shards):
    accelerate = pytest.importorskip("accelerate")
    options = {"offload_folder": tmp_path / "o", "preload_module_classes": ["TransformerEncoderLayer"]}
    model = accelerate.load_checkpoint_and_dispatch(build_empty("tiny"), str(shards), {"": "cpu"}, **options)
    assert torch.equal(call(model, IDS), expected)
    torch.save(plain.state_dict(), tmp_path / "c.bin")
    load_checkpoint_and_dispatch(build_empty("tiny"), tmp_path / "c.bin", ALL, offload_folder=tmp_path / "ours")
    theirs = accelerate.load_checkpoint_and_dispatch(
        build_empty("tiny"), str(tmp_path / "ours"), {"": "cpu"}, **options
    )
    assert torch.equal(call(theirs, IDS), expected)


# --- the command


def test_the_command(course):
    result = course.run(7)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    seven = facts(result.stdout)
    assert seven["missing_keys"] == seven["unexpected_keys"] == "[]" and seven["logits_equal"] == "True"
    assert {seven[key] for key in seven if key.startswith("device_map[")} == {"0", "cpu", "disk"}
    assert seven["peak_resident_bytes"] == seven["forecast_peak_bytes_0"]
    assert "encoder.layers.1: disk -> cpu -> disk bytes=199936" in result.stdout.splitlines()
    folder = course.artifacts / "tiny_transformer"
    for arguments in (["--max-memory", "0=240000", "cpu=0"], ["--checkpoint", str(folder)]):
        assert facts(course.run(7, *arguments).stdout)["logits_equal"] == "True"
    assert facts(course.run(7, "--max-memory", "0=1GB").stdout)["peak_resident_bytes"] == "637192"
    pickled = facts(course.run(7, "--checkpoint", str(course.artifacts / "tiny_transformer.pt")).stdout)
    assert pickled["logits_equal"] == "True" and (course.artifacts / "offload").is_dir()
    refused = course.run(7, "--max-memory", "0=100KB", "cpu=100KB", "disk=0")
    assert refused.returncode == 1 and "have no place" in refused.stderr and "Traceback" not in refused.stderr
    missing = course.run(7, "--checkpoint", "nowhere")
    assert missing.returncode == 1 and "nowhere does not exist" in missing.stderr and "Traceback" not in missing.stderr
