"""Step 5: plans that cover everything, keep their promises, and are Accelerate's where Accelerate is right."""

import copy
import random
import re
import subprocess
import sys
import time
import warnings

import pytest
import torch
from conftest import facts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from step03_meta_build.meta_build import build_empty, init_empty_weights
from step04_to_empty_load.load_with_meta import find_tied_parameters, named_tensors
from step05_device_map import device_map as step05
from step05_device_map.device_map import (
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    container_limit,
    convert_file_size_to_int,
    dtype_byte_size,
    explain_device_map,
    find_blocks,
    forecast,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    infer_auto_device_map,
    named_module_tensors,
    override_device_map,
    plan_device_map,
    replay,
    resolve_device_map,
)

accelerate = pytest.importorskip("accelerate")
warnings.filterwarnings("ignore", message="Device .* is not available")


def linear(width=10):
    """One of 440 bytes, if the width is 10: 400 of weight, 40 of bias."""
    return nn.Linear(width, width)


def container(**children):
    """A module that is no container of PyTorch's, so that it stands for anybody's own."""
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def bytes_by_device(model, device_map):
    held = {}
    for name, device in resolve_device_map(model, device_map).items():
        held.setdefault(device, {})[id(dict(named_tensors(model))[name])] = dict(named_tensors(model))[name].nbytes
    return {device: sum(sizes.values()) for device, sizes in held.items()}


# --- sizes


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int2, torch.bool, torch.float8_e4m3fn, torch.float4_e2m1fn_x2])
def test_p6_small_dtypes_count_what_they_are_stored_in(dtype):
    assert dtype_byte_size(dtype) == torch.empty(1, dtype=dtype).element_size() == 1


def test_dtypes_as_text():
    assert dtype_byte_size("float16") == dtype_byte_size("torch.bfloat16") == 2
    for wrong in ("float17", "nn", "", 7):
        with pytest.raises(ValueError, match="is not a dtype"):
            dtype_byte_size(wrong)


def test_p7_a_plan_counts_the_dtype_that_will_be_stored():
    assert compute_module_sizes(linear().half(), dtype=torch.float32)["weight"] == 400
    sizes = compute_module_sizes(nn.BatchNorm1d(10), dtype="float16", special_dtypes={"bias": torch.float64})
    assert (sizes["weight"], sizes["bias"], sizes["num_batches_tracked"]) == (20, 80, 8)


def test_sizes_count_a_tied_tensor_once_in_each_prefix():
    model = container(a=container(x=linear(), y=linear()), b=linear())
    model.a.y.weight = model.b.weight = model.a.x.weight
    sizes = compute_module_sizes(model)
    assert (sizes["a.x"], sizes["b"], sizes["a"], sizes[""]) == (440, 440, 480, 520)
    assert compute_module_sizes(nn.BatchNorm1d(4), buffers_only=True)[""] == 16 + 16 + 8


def test_sizes_agree_with_accelerate_on_untied_models():
    model = build_empty("tiny")
    for options in ({}, {"dtype": "float16"}, {"buffers_only": True}):
        theirs = dict(accelerate.utils.compute_module_sizes(model, **options))
        assert compute_module_sizes(model, **options) == ({"": 0} | theirs)


def test_largest_layer_and_module_tensors():
    model = build_empty("tiny")
    sizes, children = compute_module_sizes(model), list(model.named_children())
    ours = get_max_layer_size(children, sizes, ["TransformerEncoderLayer"])
    assert ours == accelerate.utils.get_max_layer_size(children, sizes, ["TransformerEncoderLayer"])
    assert ours == (199936, [f"encoder.layers.{i}" for i in range(3)])
    assert get_max_layer_size(children, sizes, [])[0] == 4 * (64 * 256 + 256)
    assert [name for name, _ in named_module_tensors(nn.BatchNorm1d(2))][:3] == ["weight", "bias", "running_mean"]
    assert convert_file_size_to_int("10GiB") == 10 * 2**30


# --- blocks


def test_blocks_are_the_callers_or_the_models_or_the_lists():
    model = build_empty("tiny")
    layers = [f"encoder.layers.{i}" for i in range(3)]
    assert list(find_blocks(model)) == layers
    assert list(find_blocks(model, "TransformerEncoder")) == ["encoder"]
    assert find_blocks(model, []) == {}
    model._no_split_modules = ["MultiheadAttention"]
    assert list(find_blocks(model)) == [f"{layer}.self_attn" for layer in layers]
    model._no_split_modules = ["NotInThisModel"]
    assert list(find_blocks(model)) == layers
    nested = container(outer=nn.ModuleList([nn.ModuleList([linear(), linear()])]))
    assert list(find_blocks(nested)) == ["outer.0"]


def test_h11_no_split_modules_of_a_transformers_model_are_respected():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    with init_empty_weights():
        model = transformers.LlamaForCausalLM(config)
    sizes = compute_module_sizes(model)
    layer = sizes["model.layers.0"]
    for budget in range(sizes[""] // 5, sizes[""], 997):
        device_map = infer_auto_device_map(model, {0: budget, "cpu": 10**9})
        resolved = resolve_device_map(model, device_map)
        for i in range(4):
            assert len({d for name, d in resolved.items() if name.startswith(f"model.layers.{i}.")}) == 1
        assert sum(sizes.get(key, 0) for key, device in device_map.items() if device == 0) <= budget
        assert layer in [sizes[f"model.layers.{i}"] for i in range(4)]


# --- budgets


def test_a_table_is_checked_ordered_and_not_changed():
    table = {"cpu": "2KiB", "cuda:3": 30, "1": "1KB", 0: "7", "disk": 10**9}
    before = copy.deepcopy(table)
    assert list(get_max_memory(table).items()) == [(0, 7), (1, 1000), (3, 30), ("cpu", 2048), ("disk", 10**9)]
    assert table == before
    with pytest.raises(ValueError) as caught:
        get_max_memory({"gpu": 1, 0: "much", "cuda:0": 5, "0": 5, True: 1, -1: 3, 2: -5})
    for part in ["'gpu' is not a device", "'much' is not a size", "0 stands twice", "-1 is not a device", "-5 is not"]:
        assert part in str(caught.value)


def test_the_measured_table_has_what_is_here(monkeypatch):
    table = get_max_memory()
    assert table["cpu"] > 0 and len(table) == 1 + torch.accelerator.device_count()
    monkeypatch.setattr(step05, "container_limit", lambda: 12345)
    assert get_max_memory()["cpu"] == 12345


@pytest.mark.parametrize(
    ("files", "left"),
    [({}, float("inf")), ({"memory.max": "max\n", "memory.current": "5"}, float("inf")),
     ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
     ({"memory.max": "100", "memory.current": "400"}, 0),
     ({"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "1"}, 999)],
)  # fmt: skip
def test_a_containers_limit_is_read(tmp_path, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_limit(tmp_path) == left


def test_p8_the_order_of_the_table_does_not_matter():
    model = nn.Sequential(*[linear() for _ in range(8)])
    budgets = {0: 1400, 1: 1000, "cpu": 1500}
    plan = infer_auto_device_map(model, budgets)
    for keys in ([1, "cpu", 0], ["cpu", 1, 0], ["cpu", 0, 1]):
        assert infer_auto_device_map(model, {key: budgets[key] for key in keys}) == plan


@pytest.mark.parametrize("table", [{0: 10**6, 3: 10**6}, {2: 10**6, 5: 10**6, 7: 10**6}, {0: 0, 1: 10**6, 3: 10**6}])
def test_p9_balanced_low_0_uses_the_ids_that_exist(table):
    model = nn.Sequential(*[linear() for _ in range(12)])
    lowered = get_balanced_memory(model, table, low_zero=True)
    assert lowered.keys() == table.keys() and all(lowered[key] <= table[key] for key in table)
    device_map, _ = plan_device_map(model, "balanced_low_0", table)
    check_device_map(model, device_map)
    first = [key for key, size in table.items() if size][0]
    used = bytes_by_device(model, device_map)
    assert used.get(first, 0) <= min(used[key] for key in table if table[key] and key != first)
    assert 0 not in used or table[0] > 0


@pytest.mark.parametrize("low_zero", [False, True])
def test_balanced_memory_is_accelerates(low_zero):
    model = build_empty("tiny")
    for table in ({0: 10**6, 1: 10**6}, {0: 10**6, 1: 10**6, 2: 300_000, "cpu": 10**7}, {0: 10**6}):
        for classes in (["TransformerEncoderLayer"], []):
            theirs = accelerate.utils.get_balanced_memory(
                model, dict(table), no_split_module_classes=classes, low_zero=low_zero
            )
            ours = get_balanced_memory(model, table, no_split_module_classes=classes, low_zero=low_zero)
            assert ours == theirs, (table, classes)


def test_strategies():
    model, table = build_empty("small"), {0: 10**8, 1: 10**8}
    used = {s: bytes_by_device(model, plan_device_map(model, s, table)[0]) for s in ("auto", "balanced", "sequential")}
    assert used["auto"] == used["balanced"] and abs(used["auto"][0] - used["auto"][1]) < 0.3 * sum(
        used["auto"].values()
    )
    assert used["sequential"][0] > 2 * used["sequential"][1]
    with pytest.raises(ValueError, match="'fast' is unknown; choose one of auto, balanced"):
        plan_device_map(model, "fast", table)


# --- the cases


def test_p1_buffers_of_a_split_module_have_a_device():
    block = container(l1=linear(), l2=linear())
    block.register_buffer("scale", torch.ones(1))
    model = nn.Sequential(block, linear())
    with pytest.warns(UserWarning, match="0 .Module. is cut between"):
        device_map = infer_auto_device_map(model, {0: 1000, 1: 10000})
    assert device_map == {"0.scale": 0, "0.l1": 0, "0.l2": 1, "1": 1}
    check_device_map(model, device_map)


class TwoRaw(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(100, 100)), nn.Parameter(torch.zeros(100, 100))
        self.linear = linear(100)


@pytest.mark.parametrize("budget", range(0, 200_000, 7_000))
def test_p2_a_modules_own_parameters_stay_together(budget):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        device_map = infer_auto_device_map(TwoRaw(), {"cpu": budget})
    resolved = resolve_device_map(TwoRaw(), device_map)
    assert resolved["a"] == resolved["b"] and resolved["linear.weight"] == resolved["linear.bias"]
    assert bytes_by_device(TwoRaw(), device_map).get("cpu", 0) <= budget


def test_p2_what_cannot_run_within_the_budget_is_said():
    with pytest.warns(UserWarning, match="with a, b on it, cpu holds 120400 B, and its budget is 90000 B"):
        infer_auto_device_map(TwoRaw(), {"cpu": 90_000})


def test_p2_a_parameter_level_key_counts_or_is_refused_by_name():
    resolved = resolve_device_map(TwoRaw(), {"a": "cpu", "b": "cpu", "": 0})
    assert resolved == {"a": "cpu", "b": "cpu", "linear.weight": 0, "linear.bias": 0}
    with pytest.raises(ValueError, match="what the model owns itself must be on one device: {'a': 'cpu', 'b': 0}"):
        check_device_map(TwoRaw(), {"a": "cpu", "": 0})


def test_p3_names_compare_by_their_parts():
    model = nn.ModuleList([nn.Linear(10, 10, bias=False) for _ in range(15)])
    for i in range(1, 15):
        model[i].weight = model[1].weight
    model = container(layers=model)
    assert infer_auto_device_map(model, {0: 1300, "cpu": 10**4}) == {"": 0}
    assert infer_auto_device_map(model, {0: 700, "cpu": 10**4}) == {"": "cpu"}
    split = infer_auto_device_map(model, {0: 790, "cpu": 10**4}, clean_result=False)
    assert len({split[f"layers.{i}"] for i in range(1, 15)}) == 1
    resolved = resolve_device_map(model, {"layers": "cpu", "layers.1": 0})
    assert [name for name, device in resolved.items() if device == 0] == ["layers.1.weight"]


@pytest.mark.parametrize("budget", range(300, 1000, 20))
def test_p4_both_ends_of_a_tie_are_on_one_device(budget):
    def coder():
        return nn.Sequential(linear(), linear())

    model = container(encoder=coder(), decoder=coder())
    for i in (0, 1):
        model.decoder[i].weight = model.encoder[i].weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resolved = resolve_device_map(model, infer_auto_device_map(model, {0: budget, "cpu": 10**6}))
    for group in find_tied_parameters(model):
        assert len({resolved[name] for name in group}) == 1
    with pytest.raises(ValueError, match="encoder.0, decoder.0, encoder.1, decoder.1"):
        infer_auto_device_map(model, {0: 200, "disk": 0})


def seconds_to_plan(count):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])
    start = time.perf_counter()
    infer_auto_device_map(model, {0: count * 20, 1: count * 20, "cpu": count * 80})
    return time.perf_counter() - start


def test_p5_planning_grows_with_the_number_of_modules_not_with_its_square(monkeypatch):
    """Countable, not timed: how often the walk asks whether something fits."""
    asked = []
    fits = step05.Packer.fits
    monkeypatch.setattr(step05.Packer, "fits", lambda *args: asked.append(1) or fits(*args))
    counts = []
    for modules in (500, 1000, 2000, 4000):
        asked.clear()
        seconds_to_plan(modules)
        counts.append(len(asked))
    assert all(later <= 2.1 * earlier for earlier, later in zip(counts, counts[1:], strict=False)), counts


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(linear(), linear())

    def forward(self, x):
        return x + self.f(x)


def test_p10_a_residual_block_that_is_split_is_named():
    model = nn.Sequential(Residual(), Residual(), Residual())
    with pytest.warns(UserWarning, match=r"1 \(Residual\) is cut between devices \[0, 1\]"):
        infer_auto_device_map(model, {0: 1800, 1: 10_000})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = infer_auto_device_map(model, {0: 1800, 1: 10_000}, no_split_module_classes=["Residual"])
        assert whole == {"0": 0, "1": 1, "2": 1}
        infer_auto_device_map(model, {0: 2000, "cpu": 10_000})  # what is on the cpu runs on 0
        infer_auto_device_map(build_empty("tiny"), {0: 450_000, 1: 10**6})  # made to be cut between its blocks


def test_p11_headroom_keeps_room_for_activations_and_is_named():
    model = nn.Sequential(*[linear() for _ in range(4)])
    assert infer_auto_device_map(model, {0: 4 * 440, "cpu": 10**5}) == {"": 0}
    device_map = infer_auto_device_map(model, {0: 4 * 440, "cpu": 10**5}, headroom=100)
    assert device_map == {"0": 0, "1": 0, "2": "cpu", "3": "cpu"}
    text = explain_device_map(model, device_map, {0: 4 * 440, "cpu": 10**5}, headroom="100B")
    assert "headroom=100" in text
    with pytest.raises(ValueError, match="is not a size"):
        infer_auto_device_map(model, {0: 500}, headroom="-1")


# --- promises


def test_an_offloaded_block_that_is_larger_than_those_before_it_can_come_back():
    model = nn.Sequential(linear(10), linear(20), linear(10))  # 440, 1680, 440 bytes
    device_map = infer_auto_device_map(model, {0: 2000, "cpu": 10**5})
    assert device_map == {"0": "cpu", "1": "cpu", "2": "cpu"} or device_map == {"": "cpu"}
    assert infer_auto_device_map(model, {0: 2200, "cpu": 10**5}) == {"0": 0, "1": "cpu", "2": "cpu"}


def test_an_accelerator_that_is_not_the_first_keeps_the_room_if_it_runs_the_offloaded_blocks():
    model = nn.Sequential(*[linear() for _ in range(6)])
    table = {0: 0, 1: 4 * 440, "cpu": 10**5}
    theirs = accelerate.infer_auto_device_map(model, dict(table))
    assert sum(device == 1 for device in theirs.values()) == 4, "Accelerate leaves no room on 1, and runs there"
    assert sum(device == 1 for device in infer_auto_device_map(model, table).values()) == 3


def test_disk_is_the_last_resort_and_0_forbids_it():
    model = nn.Sequential(*[linear() for _ in range(4)])
    assert infer_auto_device_map(model, {"cpu": 1000})["3"] == "disk"
    assert infer_auto_device_map(model, {"cpu": 10**4, "disk": 0}) == {"": "cpu"}
    with pytest.raises(ValueError) as caught:
        infer_auto_device_map(model, {0: 500, "cpu": 500, "disk": 500})
    message = str(caught.value)
    assert message.startswith("1320 B have no place: 1, 2, 3. ") and "disk: 60 B free of 500 B" in message


def test_what_the_walk_passed_by_is_used_before_giving_up():
    model = nn.Sequential(linear(), linear(20), linear())
    device_map = infer_auto_device_map(model, {0: 900, 1: 1680, "disk": 0})
    assert device_map == {"0": 0, "1": 1, "2": 0}


def test_a_block_that_no_device_can_hold_is_split_with_a_warning():
    with pytest.warns(
        UserWarning, match="encoder.layers.0, encoder.layers.1, encoder.layers.2: .* 150000 B, and .* It is split"
    ):
        device_map = infer_auto_device_map(build_empty("tiny"), {0: 150_000, "cpu": 150_000})
    check_device_map(build_empty("tiny"), device_map)
    assert all(any(key.startswith(f"encoder.layers.{i}.") for key in device_map) for i in range(3))
    costs = forecast(replay(build_empty("tiny"), device_map, {0: 150_000, "cpu": 150_000})[0])
    assert costs["peak_bytes_0"] <= 150_000  # what was split to fit does not come whole


def test_buffers_that_stay_on_the_executing_device_count_there():
    def layer():
        module = container(linear=linear())
        module.register_buffer("table", torch.zeros(100))  # 400 bytes
        return module

    model = container(layers=nn.ModuleList([layer() for _ in range(4)]))
    table = {0: 2600, "cpu": 10**5}
    assert sum(d == 0 for d in infer_auto_device_map(model, table, offload_buffers=True).values()) == 2
    staying = infer_auto_device_map(model, table)
    assert sum(device == 0 for device in staying.values()) == 1
    costs = forecast(replay(model, staying, table)[0])
    assert costs["peak_bytes_0"] == 840 + 3 * 400 + 440 and costs["moved_bytes_per_forward"] == 3 * 440


def test_one_module_under_two_names_is_one():
    shared = linear()
    model = container(a=container(x=shared), b=container(y=shared, z=linear()))
    assert compute_module_sizes(model)[""] == 880
    for budget in (500, 900, 1400):
        resolved = resolve_device_map(model, infer_auto_device_map(model, {0: budget, "cpu": 10**4}))
        assert resolved["a.x.weight"] == resolved["b.y.weight"] and len(resolved) == 6


def test_fallback_gives_an_empty_device_what_fits():
    model = nn.Sequential(linear(20), linear(), linear())
    assert infer_auto_device_map(model, {0: 500, 1: 10**4}) == {"": 1}
    ours = infer_auto_device_map(model, {0: 2200, 1: 10**4}, fallback_allocation=True)
    assert ours == accelerate.infer_auto_device_map(model, {0: 2200, 1: 10**4}, fallback_allocation=True)


def test_fallback_and_second_choice_keep_the_room_on_the_device_that_executes():
    model = nn.Sequential(linear(20), linear(20), linear(10))
    table = {0: 2200, 1: 1700, "cpu": 10**5}
    device_map = infer_auto_device_map(model, table, fallback_allocation=True)
    costs = forecast(replay(model, device_map, table)[0])
    assert costs["peak_bytes_0"] <= 2200 and "peak_bytes_1" not in costs or costs["peak_bytes_1"] <= 1700
    model = nn.Sequential(linear(20), linear(20), nn.ReLU(), linear(20))
    assert 0 not in infer_auto_device_map(model, {0: 1700, 1: 10**5}, fallback_allocation=True).values()


def test_tied_buffers_count_once():
    layers = nn.ModuleList(container(linear=linear()) for _ in range(4))
    layers[0].register_buffer("table", torch.zeros(100))
    for layer in layers[1:]:
        layer.register_buffer("table", layers[0].table)
    model = container(emb=linear(), layers=layers)
    total = compute_module_sizes(model)[""]
    assert infer_auto_device_map(model, {0: total, "cpu": 10**5}) == {"": 0}
    costs = forecast(replay(model, {"emb": 0, "layers": "cpu"}, {0: 10**5})[0])
    assert costs["peak_bytes_0"] == 440 + 400 + 440


def test_reasons_are_true():
    model = build_empty("tiny")
    table = {0: 450_000, "cpu": 10**6}
    lines = explain_device_map(model, infer_auto_device_map(model, table), table).splitlines()
    reason = next(line for line in lines if line.startswith("classifier"))
    assert "would fit, but the walk never goes back" in reason
    for line in lines:
        found = re.search(r"has (\d+) B free; (\d+) B \+ (\d+) B reserved (do not fit|would fit)", line)
        if found:
            free, size, room = map(int, found.groups()[:3])
            assert (size + room > free) == (found.group(4) == "do not fit"), line


def test_one_module_under_two_names_without_tensors_is_on_one_device():
    act = nn.ReLU()
    model = nn.Sequential(linear(), act, linear(), linear(), act)
    device_map = infer_auto_device_map(model, {0: 900, "cpu": 10**4}, clean_result=False)
    assert device_map["1"] == device_map["4"]


def test_verbose_tells_the_decisions(capsys):
    infer_auto_device_map(nn.Sequential(linear(), linear()), {0: 500, "cpu": 10**4}, verbose=True)
    assert capsys.readouterr().out.splitlines() == [
        "0: 0 has 500 B free; 440 B + 440 B reserved do not fit", "0: on cpu", "1: on cpu",
    ]  # fmt: skip


# --- maps


def test_a_map_with_faults_names_them_all():
    model = build_empty("tiny")
    wrong = {"encoder": 0, "encoder.layers.7": "cpu", "classifier": "gpu", "token_embedding.weight": None, "clas": 0}
    with pytest.raises(ValueError) as caught:
        check_device_map(model, wrong)
    for part in [
        "'encoder.layers.7' names nothing", "'clas' names nothing", "classifier: 'gpu' is not a device",
        "token_embedding.weight: None is not", "position_embedding.weight has no device",
    ]:  # fmt: skip
        assert part in str(caught.value)
    check_device_map(model, {"": "cuda:1"})
    check_device_map(model, {"": 0, "encoder.layers.1": torch.device("cpu")})


def test_non_persistent_buffers_need_a_device_too():
    model = container(a=linear())
    model.register_buffer("table", torch.zeros(3), persistent=False)
    with pytest.raises(ValueError, match="table has no device"):
        check_device_map(model, {"a": 0})


def test_maps_are_merged_like_accelerates():
    rng = random.Random(0)
    for _ in range(200):
        keys = {".".join(rng.choice("abc") for _ in range(3)) for _ in range(rng.randint(1, 12))}
        device_map = {key: rng.choice([0, 0, 1, "cpu"]) for key in sorted(keys)}
        before = dict(device_map)
        assert clean_device_map(device_map) == accelerate.utils.modeling.clean_device_map(dict(device_map))
        assert device_map == before
    assert clean_device_map({"a.b": 0, "a.c": 0, "d.e": 0, "d.f": 0}, "a") == {"a": 0, "d.e": 0, "d.f": 0}


def test_single_entries_of_a_merged_map_can_be_changed():
    model = build_empty("tiny")
    changed = override_device_map(model, {"": 0}, {"encoder.layers.2": "disk", "encoder.layers.0.linear1": "cpu"})
    assert changed["encoder.layers.2"] == "disk" and changed["encoder.layers.0.linear1"] == "cpu"
    assert changed["encoder.layers.0.linear2"] == 0 and changed["encoder.layers.1"] == 0
    resolved = resolve_device_map(model, changed)
    assert sum(device == "disk" for device in resolved.values()) == 12
    assert override_device_map(model, changed, {"encoder.layers.2": 0, "encoder.layers.0.linear1": 0}) == {"": 0}
    assert override_device_map(model, changed, {"encoder": "disk"})["encoder"] == "disk"  # all that is in it
    assert override_device_map(model, changed, {"": "cpu"}) == {"": "cpu"}
    with pytest.raises(ValueError, match="names nothing"):
        override_device_map(model, {"": 0}, {"encoder.layers.9": "disk"})
    merged = {"": 0}
    merged["encoder.layers.2"] = "disk"
    check_device_map(model, merged)


def test_an_empty_accelerator_has_a_reason():
    model = container(a=linear(20), b=linear())
    table = {0: 100, 1: 5000, 2: 5000, "cpu": 10**5}
    lines = explain_device_map(model, infer_auto_device_map(model, table), table).splitlines()
    first, third = (next(line for line in lines if line.startswith(device)) for device in ("0 ", "2 "))
    assert first.endswith("(empty: a: 0 has 100 B free; 1680 B + 440 B reserved do not fit)")
    assert third.endswith("(empty: everything is on the devices before it)")


def test_the_forecast_counts_what_moves_and_what_is_there():
    model = build_empty("tiny")
    table = {0: 450_000, "cpu": 410_000}
    costs = forecast(replay(model, infer_auto_device_map(model, table), table)[0])
    assert costs == {
        "moved_bytes_per_forward": 2 * 199936 + 520, "peak_bytes_0": 36864 + 2 * 199936,
        "peak_bytes_0_with_prefetch": 36864 + 3 * 199936, "peak_bytes_cpu": 2 * 199936 + 520,
    }  # fmt: skip
    alone = forecast(replay(model, {"": "cpu", "encoder.layers.1": "disk"}, {"cpu": 10**6})[0])
    assert alone["moved_bytes_per_forward"] == 199936 and alone["peak_bytes_cpu"] == 637192


# --- Accelerate, where it is right


def random_model(rng):
    """Build a model of one of five kinds, on meta; returns it and the classes that must stay whole."""
    width = rng.choice([4, 8, 16])
    kind = rng.choice(["chain", "blocks", "experts", "ties", "buffers"])

    def block():
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    with torch.device("meta"):
        count = rng.randint(3, 12)
        if kind == "chain":
            model, whole = nn.Sequential(*[nn.Linear(width, width) for _ in range(count)]), []
        elif kind == "buffers":
            model, whole = nn.Sequential(*[nn.BatchNorm1d(width) for _ in range(count)]), []
        elif kind == "experts":
            layers = [
                nn.Sequential(nn.LayerNorm(width), nn.ModuleList(block() for _ in range(3))) for _ in range(count)
            ]
            model, whole = (
                nn.ModuleDict({"layers": nn.Sequential(*layers), "out": nn.Linear(width, 3)}),
                ["ModuleList"],
            )
        else:
            embedding = nn.Embedding(rng.randint(5, 80), width)
            layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2) for _ in range(count))
            head = nn.Linear(width, embedding.num_embeddings, bias=False)
            if kind == "ties":
                head.weight = embedding.weight
            model = nn.ModuleDict({"embedding": embedding, "layers": layers, "head": head})
            whole = ["TransformerEncoderLayer"]
    return model, whole


def scenarios(count):
    rng = random.Random(47)
    for _ in range(count):
        model, whole = random_model(rng)
        total = compute_module_sizes(model)[""]
        table = {0: int(total * rng.uniform(0.2, 0.9))}
        if rng.random() < 0.5:
            table[1] = int(total * rng.uniform(0.2, 0.9))
        if rng.random() < 0.7:
            table["cpu"] = int(total * rng.uniform(0.1, 1))
        yield model, whole, table, rng.choice([None, "float16"]), rng.random() < 0.5


def why_ours_is_right(model, whole, table, dtype, ours, theirs):
    """Where the plans differ, Accelerate's must break one of the promises; say which."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check_device_map(model, theirs)
        except ValueError as error:
            return f"theirs gives no device: {error}"
        packer = replay(model, theirs, table, whole, dtype, offload_buffers=True)[0]
    for device, used in packer.used.items():
        if used > packer.budget[device]:
            return f"theirs puts {used} B on {device}, which may hold {packer.budget[device]} B"
    peak = forecast(packer)
    main = packer.executing
    if peak[f"peak_bytes_{main}"] > packer.budget[main]:
        return f"theirs needs {peak[f'peak_bytes_{main}']} B on {main} to run what is elsewhere"
    return None


def resolved_or_none(model, device_map):
    try:
        return resolve_device_map(model, device_map)
    except ValueError:
        return None


def test_maps_equal_accelerates_or_theirs_breaks_a_promise():
    equal, different, kinds = 0, [], set()
    for model, whole, table, dtype, clean in scenarios(300):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = infer_auto_device_map(
                model, table, whole, dtype, clean_result=clean, offload_buffers=True
            )  # fmt: skip
            theirs = dict(
                accelerate.infer_auto_device_map(
                    model, dict(table), whole, dtype, clean_result=clean, offload_buffers=True
                )
            )
        same = ours == theirs if clean else resolve_device_map(model, ours) == resolved_or_none(model, theirs)
        if same:
            equal += 1
            kinds.add((type(model).__name__, tuple(whole), len(table)))
        else:
            different.append((why_ours_is_right(model, whole, table, dtype, ours, theirs), ours, theirs, table))
    assert equal >= 280 and len(kinds) >= 8, (equal, kinds)
    unexplained = [case for case in different if case[0] is None]
    assert unexplained == [], (equal, len(different), len(unexplained), unexplained[0])


# --- properties


@st.composite
def module_trees(draw, depth=0):
    """Draw a module tree: linears, own parameters, buffers, lists of blocks."""
    module = nn.Module() if depth or draw(st.booleans()) else nn.Sequential()
    if draw(st.integers(0, 3)) == 0:
        module.own = nn.Parameter(torch.empty(draw(st.integers(1, 50)), device="meta"))
    if draw(st.integers(0, 3)) == 0:
        module.register_buffer("table", torch.empty(draw(st.integers(1, 50)), device="meta"), persistent=False)
    for i in range(draw(st.integers(1, 3))):
        if depth < 2 and draw(st.booleans()):
            child = draw(module_trees(depth=depth + 1))
        else:
            child = nn.Linear(draw(st.integers(1, 12)), draw(st.integers(1, 12)), device="meta")
        module.add_module(f"m{i}", nn.ModuleList([child]) if draw(st.integers(0, 4)) == 0 else child)
    if depth == 0 and draw(st.booleans()):
        linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
        for m in linears[1:]:
            if m.weight.shape == linears[0].weight.shape:
                m.weight = linears[0].weight
    return module


budgets = st.dictionaries(st.sampled_from([0, 1, 2, "cpu"]), st.integers(0, 3000), min_size=1)


@settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(module_trees(), budgets, st.booleans(), st.integers(0, 200), st.booleans())
def test_every_plan_keeps_the_promises(model, table, offload_buffers, headroom, fallback):
    options = {"offload_buffers": offload_buffers, "headroom": headroom}
    before, names = dict(table), [name for name, _ in named_tensors(model)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device_map = infer_auto_device_map(model, table, fallback_allocation=fallback, **options)
        shuffled = dict(reversed(table.items()))
        assert infer_auto_device_map(model, shuffled, fallback_allocation=fallback, **options) == device_map
    assert table == before and [name for name, _ in named_tensors(model)] == names
    resolved = resolve_device_map(model, device_map)  # complete, and no entry names nothing
    for group in find_tied_parameters(model):
        assert len({resolved[name] for name in group}) == 1
    packer, _, why_empty = replay(model, device_map, table, **options)
    for device, used in packer.used.items():
        assert used <= packer.budget[device]
    explain_device_map(model, device_map, table, **options)
    assert all(packer.used[d] or d in why_empty or max(map(step05.device_order, resolved.values())) < (0, d)
               for d in table if d != "cpu")  # fmt: skip
    if not any(text in str(warning.message) for warning in caught for text in ("cannot run", "is split")):
        main = packer.executing
        if main in table:
            assert forecast(packer)[f"peak_bytes_{main}"] + headroom * (main != "cpu") <= table[main]


# --- the command


def test_the_command_is_deterministic_and_plans_for_what_is_not_here(course):
    first, second = course.run(5), course.run(5)
    assert first.returncode == 0 and first.stderr == "" and first.stdout == second.stdout
    found = facts(first.stdout)
    assert found["device_map['encoder.layers.0']"] == "0" and found["device_map['encoder.layers.2']"] == "cpu"
    assert found["moved_bytes_per_forward"] == "400392"
    assert not course.artifacts.exists()


def test_giant_is_planned_for_eight_accelerators_in_little_memory(course):
    memory = [f"{i}=24GiB" for i in range(8)]
    result = course.run(
        5, "--config", "giant", "--dtype", "float16", "--strategy", "balanced", "--set", "encoder.layers.2=disk",
        "--max-memory", *memory, "cpu=64GiB",
    )  # fmt: skip
    assert result.returncode == 0 and result.stderr == ""
    found = facts(result.stdout)
    assert found["device_map['encoder.layers.2']"] == "disk" and found["device_map['encoder.layers.79']"] == "7"
    assert found["moved_bytes_per_forward"] == str(2 * 805412864)


@pytest.mark.parametrize(
    ("options", "part"),
    [(["--max-memory", "0"], "as a pair"), (["--max-memory", "gpu=1GB"], "'gpu' is not a device"),
     (["--set", "encoder.layers.9=disk"], "names nothing"), (["--strategy", "best"], "choose one of"),
     (["--dtype", "float17"], "is not a dtype"), (["--max-memory", "cpu=1KB", "disk=0"], "have no place")],
)  # fmt: skip
def test_wrong_options_end_in_one_line(course, options, part):
    result = course.run(5, *options)
    assert result.returncode == 1 and part in result.stderr and "Traceback" not in result.stderr


def test_the_benchmark_prints_its_table():
    script = step05.Path(__file__).with_name("bench_planning.py")
    result = subprocess.run([sys.executable, script, "20", "40"], capture_output=True, text=True, check=True)
    assert "modules=40" in result.stdout and result.stdout.count("equal=True") == 2


# --- spread


def layers_of(device_map, count):
    model = build_empty("small")
    resolved = resolve_device_map(model, device_map)
    return [resolved[f"encoder.layers.{i}.norm1.weight"] for i in range(count)]


@pytest.mark.parametrize("table", [{0: "66MB", "cpu": "1GB"}, {0: "40MB", "cpu": "30MB"}, {"cpu": "60MB"}], ids=str)
def test_spread_parts_are_no_neighbours_and_cost_the_same(table):
    model = build_empty("small")
    plain, spread = infer_auto_device_map(model, table), infer_auto_device_map(model, table, spread=True)
    before, after = layers_of(plain, 8), layers_of(spread, 8)
    assert sorted(map(str, before)) == sorted(map(str, after)) and before != after
    main = 0 if 0 in table else "cpu"
    away = [device != main for device in after]
    if sum(away) <= 4:
        assert not any(one and two for one, two in zip(away, away[1:], strict=False))
    costs = [forecast(replay(model, device_map, table)[0]) for device_map in (plain, spread)]
    assert costs[0] == costs[1]


def test_spread_changes_nothing_that_is_not_alike():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 2))
    assert infer_auto_device_map(model, {0: 300}, spread=True) == infer_auto_device_map(model, {0: 300})
    everything = infer_auto_device_map(model, {0: 10_000}, spread=True)
    assert everything == {"": 0}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_spread_keeps_every_budget(seed):
    chosen = random.Random(seed)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(chosen.randint(2, 12))))
    if seed % 3 == 0 and len(model) > 3:
        model[2].weight = model[0].weight
    table = {0: chosen.randint(300, 2500), 1: chosen.randint(0, 1500), "cpu": chosen.randint(0, 2500)}
    plain, spread = infer_auto_device_map(model, table), infer_auto_device_map(model, table, spread=True)
    books = [replay(model, device_map, table)[0] for device_map in (plain, spread)]
    assert books[0].used == books[1].used and forecast(books[0]) == forecast(books[1])
