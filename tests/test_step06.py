"""Step 6: what runs under hooks gives the plain model's values, bit for bit, and nothing stays behind."""

import copy
import dataclasses
import inspect
import io
import threading
import warnings
from collections import OrderedDict, namedtuple

import pytest
import torch
from conftest import facts
from torch import nn

from step01_model_def.model_def import fixed_sequences
from step02_checkpoint.build_checkpoint import build_model
from step03_meta_build.meta_build import init_empty_weights
from step04_to_empty_load.load_with_meta import find_tied_parameters, named_tensors
from step05_device_map.device_map import forecast, infer_auto_device_map, replay
from step06_hooks_offload import hooks_offload as step06
from step06_hooks_offload.hooks_offload import (
    align_hooks,
    copy_ahead,
    AlignDevicesHook,
    ModelHook,
    OffloadTrace,
    Parked,
    ParkedWeightError,
    SequentialHook,
    add_hook_to_module,
    align_module_device,
    cpu_offload,
    cpu_offload_with_hook,
    dispatch_model,
    remove_hook_from_module,
    remove_hook_from_submodules,
    send_to_device,
    set_module_tensor_to_device,
    undispatch,
)  # fmt: skip

IDS = torch.arange(16).reshape(2, 8)


def call(model, *args, **kwargs):
    with torch.inference_mode():
        return model(*args, **kwargs)


def real_bytes(model):
    """Count the bytes of what is not parked."""
    return sum({id(t): t.nbytes for _, t in named_tensors(model) if not isinstance(t, Parked)}.values())


def check_offloaded(model, *args, offload=cpu_offload, **options):
    """Offload a copy, compare bit for bit with the model itself, and see that nothing stays behind."""
    torch.manual_seed(0)
    expected = call(model, *args)
    ours = offload(copy.deepcopy(model), **options)
    before = real_bytes(ours)
    for _ in range(2):
        torch.manual_seed(0)
        assert_same(call(ours, *args), expected)
        assert real_bytes(ours) == before
    return ours


def assert_same(a, b):
    leaves = torch.utils._pytree.tree_leaves
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    assert pairs and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


# --- every module of torch.nn

FLOATS, WIDE = torch.randn(2, 4, generator=torch.manual_seed(1)), torch.randn(2, 3, 4)
NOT_GENERIC = {
    "Module": "it has no forward",
    "ParameterList": "it holds parameters for others and has no forward",
    "ParameterDict": "it holds parameters for others and has no forward",
    "Transformer": "tested below, with two inputs",
    "TransformerDecoder": "tested below, with two inputs",
    "TransformerDecoderLayer": "tested below, with two inputs",
    "TransformerEncoder": "tested below; it takes a layer",
    "CrossMapLRN2d": "it has no parameters",
    "Container": "it has no forward",
}
GENERIC = {
    **{f"Conv{n}d": ((3, 2, 2), torch.randn(1, 3, *[4] * n)) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": ((3, 2, 2), torch.randn(1, 3, *[4] * n)) for n in (1, 2, 3)},
    **{f"BatchNorm{n}d": ((3,), torch.randn(2, 3, *[4] * n)) for n in (1, 2, 3)},
    **{f"LazyBatchNorm{n}d": None for n in (1, 2, 3)},
    "SyncBatchNorm": None, "Linear": ((4, 3), FLOATS), "Bilinear": ((4, 4, 2), FLOATS, FLOATS),
    "NonDynamicallyQuantizableLinear": ((4, 3), FLOATS), "Embedding": ((20, 4), IDS), "EmbeddingBag": ((20, 4), IDS),
    "LSTM": ((4, 3), WIDE), "GRU": ((4, 3), WIDE), "RNN": ((4, 3), WIDE), "LSTMCell": ((4, 3), FLOATS),
    "GRUCell": ((4, 3), FLOATS), "RNNCell": ((4, 3), FLOATS), "LayerNorm": ((4,), WIDE), "RMSNorm": ((4,), WIDE),
    "GroupNorm": ((3, 3), torch.randn(2, 3, 4)), "PReLU": ((), FLOATS),
    "MultiheadAttention": ((4, 2), WIDE, WIDE, WIDE),
    "TransformerEncoderLayer": ((4, 2), WIDE), "LinearCrossEntropyLoss": None,
    "AdaptiveLogSoftmaxWithLoss": ((4, 10, [3]), FLOATS, torch.tensor([1, 5])),
}  # fmt: skip


def classes_with_parameters():
    """Find the classes of torch.nn that can own a parameter."""
    for name, kind in inspect.getmembers(nn, inspect.isclass):
        if (
            issubclass(kind, nn.Module)
            and "Lazy" not in name
            and "Parameter" in inspect.getsource(inspect.getmodule(kind))
        ):
            yield name


@pytest.mark.parametrize("name", sorted(set(classes_with_parameters()) | GENERIC.keys()))
def test_every_torch_nn_module_runs_offloaded(name):
    if name in NOT_GENERIC:
        pytest.skip(NOT_GENERIC[name])
    if GENERIC.get(name, ()) is None:
        pytest.skip("a lazy, distributed or loss module")
    if name not in GENERIC:
        module = getattr(nn, name)
        try:
            module = module()
        except TypeError:
            pytest.skip("it cannot be made without arguments, and owns no parameters")
        assert list(module.parameters()) == [], f"add {name} to GENERIC"
        return
    kind = getattr(nn, name, None) or getattr(nn.modules.linear, name)
    arguments, *inputs = GENERIC[name]
    torch.manual_seed(0)
    module = kind(*arguments).eval()
    for options in ({}, {"offload_buffers": True}):
        offloaded = check_offloaded(module, *inputs, **options)
        kept = 0 if options else sum(buffer.nbytes for buffer in module.buffers())
        assert real_bytes(offloaded) == kept


@pytest.mark.parametrize(
    ("module", "inputs"),
    [(nn.Transformer(16, 2, 2, 2, 32, batch_first=True), (torch.randn(2, 4, 16), torch.randn(2, 4, 16))),
     (nn.TransformerDecoderLayer(4, 2, 8), (WIDE, WIDE)),
     (nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 2), (WIDE, WIDE)),
     (nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2), (WIDE,)),
     (torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (FLOATS,)),
     (nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()), (FLOATS,)),
     (nn.LSTM(4, 3, num_layers=2, bidirectional=True, proj_size=2), (WIDE,))],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_modules_of_modules_run_offloaded(module, inputs):
    assert real_bytes(check_offloaded(module.eval(), *inputs, offload_buffers=True)) == 0


class UsesList(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(4)) for _ in range(3))
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(4))})

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x + self.named["shift"]


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "cpu", "layers.0": 0}, {"": 0, "layers.1": "cpu"}])
def test_a_padded_batch_takes_the_same_path_of_the_encoder(device_map):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3).eval(), torch.randn(2, 4, 16)
    mask = torch.tensor([[False, False, False, True], [False, False, True, True]])
    expected = call(copy.deepcopy(model), x, src_key_padding_mask=mask)
    dispatch_model(model, device_map, main_device=0)
    before = real_bytes(model)
    with OffloadTrace(model) as happened:
        output = call(model, x, src_key_padding_mask=mask)
    assert torch.allclose(output, expected, atol=1e-6) and output[mask].abs().sum() == expected[mask].abs().sum() == 0
    sizes = {event.bytes for event in happened.events if event.bytes}
    assert real_bytes(model) == before and happened.peak_resident_bytes == before + max(sizes)
    with pytest.raises(RuntimeError):
        call(model, x[..., :3], src_key_padding_mask=mask)
    assert real_bytes(model) == before


def test_parameter_lists_are_read_by_their_owner():
    with pytest.raises(ParkedWeightError, match=r"scales.0 is parked.*preload_module_classes=\['UsesList'\]"):
        call(cpu_offload(UsesList()), FLOATS)
    check_offloaded(UsesList(), FLOATS, preload_module_classes=["UsesList"])


# --- the cases


def test_h1_multihead_attention_under_cpu_offload():
    check_offloaded(nn.MultiheadAttention(8, 2).eval(), *[torch.randn(3, 1, 8)] * 3)


@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"": 0}, {"": 0, "encoder.layers.1": "cpu"}, {"": "cpu", "classifier": 0}]
)
def test_h2_the_courses_model_needs_no_extra_argument(device_map):
    model = build_model("tiny")
    expected = call(model, IDS)
    dispatch_model(model, device_map)
    for _ in range(2):
        assert torch.equal(call(model, IDS), expected)
    assert torch.equal(call(cpu_offload(build_model("tiny"), execution_device=0), IDS), expected)


class ReadsItsChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x):
        return x @ self.child.weight.T


def test_h3_a_parent_that_reads_its_childs_weight_is_told():
    model = nn.Sequential(ReadsItsChild())
    with pytest.raises(ParkedWeightError) as caught:
        call(cpu_offload(copy.deepcopy(model)), FLOATS)
    assert "0.child.weight" in str(caught.value) and "preload_module_classes=['ReadsItsChild']" in str(caught.value)
    check_offloaded(model, FLOATS, preload_module_classes=["ReadsItsChild"])


class HasAnotherMethod(nn.Linear):
    def norm_of_weight(self):
        return self.weight.norm()


def test_h4_another_method_is_told_how_to_bring_the_weight_in():
    model = HasAnotherMethod(4, 4)
    expected = model.norm_of_weight()
    cpu_offload(model)
    with pytest.raises(ParkedWeightError, match="weight is parked.*with align_module_device"):
        model.norm_of_weight()
    with align_module_device(model), torch.inference_mode():
        assert model.norm_of_weight() == expected
    assert real_bytes(model) == 0


def test_h5_a_copy_is_a_copy():
    model = dispatch_model(build_model("tiny"), {"": 0, "encoder.layers": "cpu"})
    expected = call(model, IDS)
    twin = copy.deepcopy(model)
    assert torch.equal(call(twin, IDS), expected)
    undispatch(twin)
    with torch.no_grad():
        [parameter.zero_() for parameter in twin.parameters()]
    assert torch.equal(call(model, IDS), expected)
    undispatch(model)
    assert torch.equal(call(model, IDS), expected) and call(twin, IDS).abs().sum() == 0


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": 0, "encoder.layers": "cpu"}, {"": 0}])
def test_h6_undispatch_gives_the_ordinary_model_back(device_map):
    model, reference = build_model("tiny"), build_model("tiny")
    names = {id(p): n for n, p in model.named_parameters()}
    dispatch_model(model, device_map)
    call(model, IDS)
    assert undispatch(model) is model
    assert not step06.any_hook(model) and not any(
        hasattr(m, "_hf_hook") or "forward" in vars(m) for m in model.modules()
    )
    assert not hasattr(model, "hf_device_map") and {id(p): n for n, p in model.named_parameters()} == names
    assert_same(model.state_dict(), reference.state_dict())
    assert model.half().classifier.weight.dtype == torch.float16
    dispatch_model(model.float(), {"": 0, "classifier": "cpu"})


def tied_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(embedding=nn.Embedding(20, 4), linear=nn.Linear(4, 4), head=nn.Linear(4, 20, bias=False))
    )
    model.head.weight = model.embedding.weight
    return model


@pytest.mark.parametrize("places", ["ccc", "c0c", "0cc", "cc0", "0c0", "000"])
def test_ties_hold_across_devices_and_back(places):
    model = tied_model()
    expected = call(model, IDS)
    device_map = {
        n: 0 if place == "0" else "cpu" for n, place in zip(("embedding", "linear", "head"), places, strict=True)
    }
    dispatch_model(model, device_map, main_device=0)
    assert torch.equal(call(model, IDS), expected)
    assert find_tied_parameters(undispatch(model)) == [["embedding.weight", "head.weight"]]


class RootOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


class RootAndChildren(RootOnly):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.weight
        return x


@pytest.mark.parametrize("model", [RootOnly(), RootAndChildren()], ids=lambda m: type(m).__name__)
def test_h7_parameters_on_the_root(model):
    check_offloaded(model, FLOATS)


def test_h8_torch_compile_around_an_offloaded_model_is_right():
    model = build_model("tiny")
    expected = call(model, IDS)
    compiled = torch.compile(dispatch_model(model, {"": 0, "encoder.layers": "cpu"}), backend="eager")
    assert torch.equal(call(compiled, IDS), expected)


def test_h9_a_backward_is_refused_and_a_forward_is_not():
    step06.warn_of_grad_mode.cache_clear()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    expected = model(FLOATS)
    cpu_offload(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = model(FLOATS)
        assert torch.equal(output, expected) and len(caught) == (_ == 0)
        with pytest.raises(RuntimeError, match="a gradient has reached 1.weight|1.bias, which is offloaded"):
            output.sum().backward()
        optimizer.step()
    frozen = cpu_offload(nn.Linear(4, 4).requires_grad_(False))
    x = FLOATS.clone().requires_grad_()
    frozen(x).sum().backward()
    assert x.grad is not None


class TakesCache(nn.Linear):
    def forward(self, x, cache=None):
        self.got = cache["k"]
        return super().forward(x)


def test_h10_what_is_in_skip_keys_is_not_moved(monkeypatch):
    sent = []
    send = step06.send_to_device
    monkeypatch.setattr(step06, "send_to_device", lambda obj, *rest: sent.append(obj) or send(obj, *rest))
    model = dispatch_model(TakesCache(4, 4), {"": "cpu"}, main_device=0, skip_keys="cache")
    cache = {"k": torch.ones(1)}
    call(model, FLOATS, cache=cache)
    assert model.got is cache["k"]
    moved = send({"cache": torch.ones(1), "x": torch.ones(1)}, "meta", "cache")
    assert not moved["cache"].is_meta and moved["x"].is_meta


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_h12_batch_norms_statistics_are_kept(training, mode):
    plain = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).train(training)
    offloaded = cpu_offload(copy.deepcopy(plain), offload_buffers=True)
    with mode():
        for scale in (1, 3):
            assert torch.equal(offloaded(scale * FLOATS), plain(scale * FLOATS))
    assert_same(offloaded.state_dict(), plain.state_dict())
    assert_same(undispatch(offloaded).state_dict(), plain.state_dict())


# --- parked weights


def test_a_parked_weight_answers_and_does_not_compute():
    weight = step06.park(nn.Parameter(torch.ones(3, 3)), "a.weight", "A")
    assert weight.shape == (3, 3) and weight.dtype == torch.float32 and weight.is_meta and weight.requires_grad
    assert "a.weight" not in repr(weight.shape) and repr(weight) and weight.numel() == 9 and weight.grad is None
    ones = torch.ones(3, 3)
    for compute in [
        lambda: weight + 1, lambda: ones @ weight, lambda: weight.T, lambda: weight[0], lambda: weight.to("cpu"),
        lambda: nn.functional.linear(ones, weight), lambda: weight.tolist(), lambda: weight.data + 1,
        lambda: weight.detach().sum(), lambda: torch.cat([ones, weight]), lambda: weight.copy_(ones),
        lambda: torch.equal(weight, weight), lambda: bool(weight), lambda: torch.stack([weight]),
        lambda: weight.numpy(), lambda: copy.deepcopy(weight).sum(), lambda: ones.copy_(weight),
    ]:  # fmt: skip
        with pytest.raises(ParkedWeightError, match="a.weight is parked"):
            compute()


def test_the_garbage_that_a_meta_weight_gives_is_real():
    """The reason for all this: if PyTorch has mended it, the course can be simpler."""
    out = nn.functional.linear(torch.ones(2, 4), torch.empty(3, 4, device="meta"))
    assert out.device.type == "cpu" and out.shape == (2, 3)


def test_after_a_forward_that_raised_nothing_is_left():
    class Raises(nn.Linear):
        def forward(self, x):
            raise KeyboardInterrupt

    model = cpu_offload(nn.Sequential(nn.Linear(4, 4), Raises(4, 4)))
    with pytest.raises(KeyboardInterrupt):
        call(model, FLOATS)
    assert real_bytes(model) == 0
    with pytest.raises(KeyboardInterrupt):
        call(model, FLOATS)
    hook = model[0]._hf_hook
    assert hook.calls == [] and hook.lock.acquire(blocking=False)


def test_a_value_that_cannot_be_brought_leaves_nothing_behind():
    class Broken(dict):
        broken = False

        def __getitem__(self, key):
            if self.broken and key.endswith("bias"):
                raise OSError("the disk is gone")
            return super().__getitem__(key)

    with init_empty_weights():
        model = nn.Sequential(nn.Linear(4, 4))
    values = Broken({"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)})
    dispatch_model(model, {"": "disk"}, weights_map=values)
    values.broken = True
    with pytest.raises(OSError, match="the disk is gone"):
        call(model, FLOATS)
    assert real_bytes(model) == 0 and model[0]._hf_hook.lock.acquire(blocking=False)


# --- dispatching


def test_resident_entries_get_an_alignment_hook_and_one_device_gets_none():
    model = dispatch_model(build_model("tiny"), {"": "cpu"})
    assert not step06.any_hook(model) and model.hf_device_map == {"": "cpu"}
    model = dispatch_model(build_model("tiny"), {"": "cpu"}, force_hooks=True)
    assert step06.any_hook(model)
    model = dispatch_model(build_model("tiny"), {"": 0, "encoder.layers.1": "cpu"})
    assert not model.encoder.layers[0]._hf_hook.parked and len(model.encoder.layers[1]._hf_hook.parked) == 12
    assert isinstance(model.encoder.layers[1].linear1.weight, Parked)


def test_what_cannot_be_honoured_is_said_before_anything_changes(monkeypatch):
    model = build_model("tiny")
    before = {name: id(tensor) for name, tensor in named_tensors(model)}
    wrong = {"": 0, "encoder.layers.0": "disk", "encoder.layers.1.self_attn.out_proj": "cpu", "classifier": 1}
    with pytest.raises(ValueError) as caught:
        dispatch_model(model, wrong)
    for part in ["encoder.layers.0.linear1.weight is to be on disk: give a weights_map",
                 "encoder.layers.1.self_attn has its own tensors on [0, 'cpu']",
                 "device 1 does not exist here: this machine has no accelerator"]:  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="names nothing"):
        dispatch_model(model, {"": 0, "decoder": "cpu"})
    with init_empty_weights():
        empty = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        dispatch_model(empty, {"": "cpu"}, main_device=0)
    assert {name: id(tensor) for name, tensor in named_tensors(model)} == before and not step06.any_hook(model)
    monkeypatch.setattr(step06, "accelerators", lambda: [torch.device("cuda:0"), torch.device("cuda:1")])
    with pytest.raises(ValueError, match="device 3 does not exist here: this machine has cuda:0, cuda:1"):
        dispatch_model(model, {"": 3})


def test_a_second_dispatch_and_moving_are_refused():
    model = dispatch_model(build_model("tiny"), {"": 0, "classifier": "cpu"})
    for again in (lambda: dispatch_model(model, {"": 0, "encoder": "cpu"}), lambda: cpu_offload(model)):
        with pytest.raises(ValueError, match="dispatched already"):
            again()
    for move in (lambda: model.to("cpu"), model.half, model.cuda, lambda: model.to(torch.float16), model.cpu,
                 lambda: model.type(torch.float16)):  # fmt: skip
        with pytest.raises(RuntimeError, match="would undo its device map"):
            move()
    with pytest.raises(ParkedWeightError):
        model.classifier.to(torch.float16)


def test_state_dict_is_complete_and_real_and_a_file_takes_it():
    model, reference = build_model("tiny"), build_model("tiny").state_dict()
    dispatch_model(model, {"": 0, "encoder.layers": "cpu"})
    assert_same(dict(model.state_dict()), dict(reference))
    call(model, IDS)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    assert_same(torch.load(stream, weights_only=True), dict(reference))
    assert type(model.state_dict()["encoder.layers.0.norm1.weight"]) is torch.Tensor


def test_a_dispatched_model_can_be_pickled():
    model = dispatch_model(build_model("tiny"), {"": 0, "encoder.layers": "cpu"})
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    assert torch.equal(call(torch.load(stream, weights_only=False), IDS), call(model, IDS))


def test_values_may_come_from_a_mapping_for_a_meta_model():
    reference = build_model("tiny")
    for where in ("state_dict", "weights_map"):
        with init_empty_weights():
            model = type(reference)(**step06_config()).eval()
        dispatch_model(model, {"": "cpu"}, main_device=0, **{where: reference.state_dict()})
        assert torch.equal(call(model, IDS), call(reference, IDS))
        assert_same(dict(undispatch(model).state_dict()), dict(reference.state_dict()))


def step06_config():
    from step01_model_def.model_def import CONFIGS

    return CONFIGS["tiny"]


def test_two_threads_get_right_values():
    model = build_model("tiny")
    inputs = [torch.randint(128, (2, 8), generator=torch.manual_seed(i)) for i in range(4)]
    expected = [call(model, x) for x in inputs]
    dispatch_model(model, {"": 0, "encoder.layers": "cpu"})
    failures = []

    def work(i):
        try:
            for _ in range(20):
                assert torch.equal(call(model, inputs[i]), expected[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failures == [] and real_bytes(model) < 4 * 159298


def test_the_trace_shows_each_block_come_and_go_as_forecast():
    model, table = build_model("tiny"), {0: 477_894, "cpu": 10**6}
    device_map = infer_auto_device_map(model, table)
    costs = forecast(replay(model, device_map, table)[0])
    dispatch_model(model, device_map)
    with OffloadTrace(model) as happened:
        call(model, IDS)
    moved = [event for event in happened.events if event.bytes]
    assert [(e.block, e.kind) for e in moved[:5]] == [
        ("encoder.layers.1", "bring"), ("encoder.layers.1", "run"), ("encoder.layers.1", "drop"),
        ("encoder.layers.1", "end"), ("encoder.layers.2", "bring"),
    ]  # fmt: skip
    assert sum(event.bytes for event in moved if event.kind == "bring") == costs["moved_bytes_per_forward"]
    assert happened.peak_resident_bytes == costs["peak_bytes_0"]
    assert happened.resident_bytes[-1] == 36864 + 199936
    assert OffloadTrace.active == []


# --- hooks as such


class Doubles(ModelHook):
    def pre_forward(self, module, x):
        return (2 * x,), {}

    def post_forward(self, module, output):
        return output + 1


def test_hooks_are_added_stacked_and_removed():
    linear = nn.Linear(4, 4)
    expected, signature = call(linear, FLOATS), inspect.signature(linear.forward)
    add_hook_to_module(linear, Doubles())
    assert torch.equal(call(linear, FLOATS), call(linear._old_forward, 2 * FLOATS) + 1)
    assert inspect.signature(linear.forward) == signature and linear.forward.__doc__ == nn.Linear.forward.__doc__
    add_hook_to_module(linear, Doubles(), append=True)
    assert isinstance(linear._hf_hook, SequentialHook)
    assert torch.equal(call(linear, FLOATS), call(linear._old_forward, 4 * FLOATS) + 2)
    add_hook_to_module(linear, Doubles())
    assert isinstance(linear._hf_hook, Doubles)
    remove_hook_from_module(linear)
    assert torch.equal(call(linear, FLOATS), expected) and "forward" not in vars(linear)
    model = nn.Sequential(add_hook_to_module(nn.Linear(4, 4), Doubles()), nn.ReLU())
    remove_hook_from_submodules(model)
    assert not hasattr(model[0], "_hf_hook")


def test_when_a_later_hook_fails_the_earlier_ones_let_go():
    class Fails(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            raise ValueError("no")

    linear = add_hook_to_module(nn.Linear(4, 4), AlignDevicesHook("cpu", offload=True))
    first = linear._hf_hook
    add_hook_to_module(linear, Fails(), append=True)
    with pytest.raises(ValueError, match="no"):
        call(linear, FLOATS)
    assert real_bytes(linear) == 0 and first.calls == []


def test_ties_come_back_when_the_values_came_from_a_mapping():
    reference = tied_model()
    with init_empty_weights():
        model = tied_model()
    values = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    dispatch_model(model, {"": "cpu"}, main_device=0, weights_map=values)
    assert torch.equal(call(model, IDS), call(reference, IDS))
    assert find_tied_parameters(undispatch(model)) == [["embedding.weight", "head.weight"]]
    assert torch.equal(call(model, IDS), call(reference, IDS))


class Twice(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.a = self.b = shared
        self.own = nn.Linear(4, 4)

    def forward(self, x):
        return self.own(self.b(self.a(x)))


def test_modules_that_are_shared_inside_and_between_blocks():
    shared = nn.Linear(4, 4)
    check_offloaded(Twice(shared), FLOATS)
    chain = Chain(nn.ModuleList([Twice(shared), Twice(shared)]))
    check_offloaded(chain, FLOATS)
    assert_same(dict(undispatch(cpu_offload(copy.deepcopy(chain))).state_dict()), dict(chain.state_dict()))


class Chain(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_arguments_that_stay_are_the_callers_own():
    class Appends(nn.Linear):
        def forward(self, x, seen):
            seen["all"].append(x)
            return super().forward(x)

    seen = {"all": []}
    call(cpu_offload(Appends(4, 4)), FLOATS, seen)
    assert len(seen["all"]) == 1


def test_values_that_somebody_puts_in_place_of_parked_ones_are_used():
    model = cpu_offload(nn.Linear(4, 4))
    zeros = {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}
    with torch.inference_mode():
        assert torch.func.functional_call(model, zeros, FLOATS).abs().sum() == 0
        assert model(FLOATS).abs().sum() > 0


def test_a_post_forward_that_raises_leaves_nothing_behind():
    class Bad(ModelHook):
        def post_forward(self, module, output):
            raise ValueError("bad")

    model = nn.Sequential(nn.Linear(4, 4))
    add_hook_to_module(model[0], Bad())
    cpu_offload(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            call(model, FLOATS)
        assert real_bytes(model) == 0


def test_a_meta_model_with_resident_entries_one_name_of_a_tie_and_a_wrong_shape():
    reference = tied_model()
    one_name = {name: tensor for name, tensor in reference.state_dict().items() if name != "head.weight"}
    for device_map in ({"": "cpu"}, {"": 0, "head": "cpu"}, {"": "cpu", "head": 0}, {"": 0, "linear": "cpu"}):
        with init_empty_weights():
            model = tied_model()
        dispatch_model(model, device_map, main_device=0, state_dict=one_name)
        assert torch.equal(call(model, IDS), call(reference, IDS)), device_map
        assert find_tied_parameters(undispatch(model)) == [["embedding.weight", "head.weight"]]
    wrong = one_name | {"linear.bias": torch.ones(1)}
    with pytest.raises(ValueError, match=r"linear.bias is \[1\] there; the model wants \[4\]"):
        dispatch_model(tied_model(), {"": "cpu"}, main_device=0, weights_map=wrong)


def test_a_forward_of_the_instance_comes_back_and_so_do_dtype_and_requires_grad():
    linear = nn.Linear(4, 4)
    linear.forward = own = lambda x: x + 1
    assert undispatch(cpu_offload(linear)).forward is own
    model = dispatch_model(nn.Linear(4, 4), {"": "cpu"}, main_device=0, state_dict=nn.Linear(4, 4).half().state_dict())
    model.requires_grad_(False)
    assert undispatch(model).weight.dtype == torch.float32 and not model.weight.requires_grad
    assert model.half().weight.dtype == torch.float16


def test_a_trace_is_of_its_own_model():
    one, two = cpu_offload(nn.Linear(4, 4)), cpu_offload(nn.Linear(4, 4))
    with OffloadTrace(one) as happened:
        call(two, FLOATS)
    assert happened.events == []


def test_a_trace_of_the_encoder_books_each_layer_once_a_forward():
    model = cpu_offload(build_model("tiny"))
    with OffloadTrace(model) as happened:
        for _ in range(3):
            call(model, IDS)
    assert happened.now == 0 and happened.peak_resident_bytes == 199936
    assert [event.kind for event in happened.events if event.block == "encoder.layers.0"] == 3 * [
        "bring", "run", "drop", "end",
    ]  # fmt: skip


def test_wrong_main_devices_and_maps_are_said():
    with pytest.raises(ValueError, match="'disk' does not exist here"):
        dispatch_model(nn.Linear(4, 4), {"": "cpu"}, main_device="disk")
    with pytest.raises(ValueError, match="a device map is a dict, not 'auto'"):
        dispatch_model(nn.Linear(4, 4), "auto")


def test_no_grad_hooks_run_without_gradients():
    class NoGrad(ModelHook):
        no_grad = True

    linear = add_hook_to_module(nn.Linear(4, 4), NoGrad())
    assert not linear(FLOATS).requires_grad


def test_removing_an_offloading_hook_brings_the_values_back():
    linear = nn.Linear(4, 4)
    weight = linear.weight
    add_hook_to_module(linear, AlignDevicesHook(execution_device="cpu", offload=True))
    assert isinstance(linear.weight, Parked)
    remove_hook_from_module(linear)
    assert linear.weight is weight


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    a: torch.Tensor
    b: int = 3


def test_send_to_device_goes_into_everything():
    one = torch.ones(1)
    nested = {"l": [one, (one, 2)], "p": Pair(one, "x"), "r": Record(one), "o": OrderedDict(k=one), "n": None}
    moved = send_to_device(nested, "meta")
    assert moved["l"][0].is_meta and moved["l"][1][0].is_meta and moved["l"][1][1] == 2
    assert type(moved["p"]) is Pair and moved["p"].a.is_meta and moved["r"].a.is_meta and moved["r"].b == 3
    assert type(moved["o"]) is OrderedDict and moved["o"]["k"].is_meta and moved["n"] is None
    assert not nested["l"][0].is_meta
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 3)])
    assert type(send_to_device(packed, "cpu")) is type(packed)
    linear = nn.Linear(1, 1)
    assert send_to_device([linear], "meta")[0] is linear and not linear.weight.is_meta


def test_hooks_can_be_attached_without_a_map():
    model = build_model("tiny")
    expected = call(model, IDS)
    step06.attach_align_device_hook(model.encoder, "cpu", offload=True, weights_map={}, module_name="encoder")
    assert torch.equal(call(model, IDS), expected) and real_bytes(model) == 37384
    remove_hook_from_submodules(model)
    blocks = {"encoder.layers.0": True, "encoder.layers.1": False, "classifier": True}
    step06.attach_align_device_hook_on_blocks(model, dict.fromkeys(blocks, "cpu"), blocks)
    assert torch.equal(call(model, IDS), expected) and real_bytes(model) == 36864 + 2 * 199936
    remove_hook_from_submodules(model)
    step06.attach_execution_device_hook(model, "cpu")
    assert torch.equal(call(model, IDS), expected) and real_bytes(model) == 637192
    remove_hook_from_submodules(model)
    assert torch.equal(call(model, IDS), expected) and not step06.any_hook(model)


def test_set_module_tensor_to_device():
    with init_empty_weights():
        model = tied_model()
    set_module_tensor_to_device(model, "linear.bias", "cpu", value=torch.arange(4))
    assert model.linear.bias.tolist() == [0, 1, 2, 3] and model.linear.bias.dtype == torch.float32
    set_module_tensor_to_device(model, "linear.bias", "cpu", dtype=torch.float16)
    assert model.linear.bias.dtype == torch.float16 and isinstance(model.linear.bias, nn.Parameter)
    shapes = r"linear.weight.*\[4, 4\].*\[3\]"
    for name, options, part in [
        ("linear.nothing", {}, "linear.nothing"), ("linear.weight", {}, "on the meta device"),
        ("linear.weight", {"value": torch.ones(3)}, shapes),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=part):
            set_module_tensor_to_device(model, name, "cpu", **options)


def test_cpu_offload_with_hook_moves_whole_models_in_turn(capsys):
    first, one = cpu_offload_with_hook(nn.Linear(4, 4))
    second, two = cpu_offload_with_hook(nn.Linear(4, 4), prev_module_hook=one)
    assert call(second, call(first, FLOATS)).shape == (2, 4)
    two.offload(), one.remove(), two.remove()
    assert not hasattr(first, "_hf_hook") and not hasattr(second, "_hf_hook")


# --- beside Accelerate


@pytest.mark.parametrize("build", [tied_model, lambda: nn.Sequential(nn.Embedding(20, 4), nn.LSTM(4, 3))])
def test_outputs_equal_accelerates(build):
    accelerate = pytest.importorskip("accelerate")
    model = build().eval()
    theirs = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert_same(call(cpu_offload(copy.deepcopy(model)), IDS), call(theirs, IDS))


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "T5"])
def test_transformers_models_run_offloaded(name):
    from test_step04 import transformers_model

    model, inputs = transformers_model(name)
    expected = call(model, **inputs).logits
    for device_map in ({"": "cpu"},):
        ours = dispatch_model(copy.deepcopy(model), device_map, main_device=0)
        assert torch.equal(call(ours, **inputs).logits, expected)
        assert_same(dict(undispatch(ours).state_dict()), dict(model.state_dict()))


# --- devices that are not here: fake tensors know their device, and refuse to meet on two


@pytest.fixture
def two_fake_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)  # there is nothing to initialise
    monkeypatch.setattr(step06, "accelerators", lambda: [torch.device("cuda:0"), torch.device("cuda:1")])


def fake_model():
    """Build the course's model on meta and give it fake CPU tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with init_empty_weights():
        model = type(build_model("tiny"))(**step06_config()).eval().requires_grad_(False)
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    with mode:
        for name, tensor in named_tensors(model):
            step06.set_tensor(model, name, nn.Parameter(torch.empty(tensor.shape), requires_grad=False))
        ids = torch.zeros(2, 8, dtype=torch.long)
    return model, mode, ids


MAPS = {
    "one GPU and cpu": {"": 0, "encoder.layers.1": "cpu"},
    "two GPUs": {"": 0, "encoder.layers.1": 1, "encoder.layers.2": 1, "classifier": 1},
    "two GPUs, cpu and disk": {"": 0, "encoder.layers.0": 1, "encoder.layers.1": "cpu", "encoder.layers.2": "disk"},
    "all on the second GPU and cpu": {"": 1, "encoder": "cpu"},
}


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS.keys())
def test_on_fake_gpus_no_operation_mixes_devices(two_fake_gpus, device_map):
    model, mode, ids = fake_model()
    values = dict(named_tensors(model))
    dispatch_model(model, device_map, weights_map=values if "disk" in device_map.values() else None)
    with OffloadTrace(model) as happened, mode, torch.no_grad():
        logits = model(ids)
    assert logits.device.type == "cpu" and logits.shape == (2, 2)
    main = min(device for device in device_map.values() if isinstance(device, int))
    brought = {event.block: event.device for event in happened.events if event.kind == "run" and event.bytes}
    away = [key for key, device in device_map.items() if isinstance(device, str)]
    assert set(brought.values()) <= {f"cuda:{main}"} and all(any(b.startswith(k) for b in brought) for k in away)


def test_on_fake_gpus_a_missing_hook_is_caught(two_fake_gpus):
    model, mode, ids = fake_model()
    dispatch_model(model, MAPS["two GPUs"])
    remove_hook_from_module(model.encoder.layers[1])
    with pytest.raises(Exception, match="cuda:0"), mode, torch.no_grad():
        model(ids)


# --- on a GPU


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@on_cuda
@pytest.mark.parametrize(
    "device_map", [{"": 0}, {"": 0, "encoder.layers.1": "cpu"}, {"": "cpu", "token_embedding": 0}]
)
def test_on_cuda_every_map_gives_the_resident_models_values(device_map):
    expected = call(build_model("tiny").cuda(), IDS.cuda()).cpu()
    model = dispatch_model(build_model("tiny"), device_map)
    assert torch.equal(call(model, IDS), expected)
    assert_same(dict(undispatch(model).state_dict()), dict(build_model("tiny").state_dict()))


@on_cuda
@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": 0, "encoder": "cpu"}, {"": 0, "encoder.layers.1": "cpu"}])
def test_on_cuda_blocks_that_are_copied_ahead_compute_the_same(device_map):
    ids = fixed_sequences(1000)
    expected = call(build_model("small").cuda(), ids.cuda()).cpu()
    model = copy_ahead(dispatch_model(build_model("small"), device_map, main_device=0))
    for _ in range(30):
        assert torch.equal(call(model, ids), expected)
    ahead = next(hook.ahead for module in model.modules() for hook in align_hooks(module) if hook.ahead)
    assert all(slot.pinned.is_pinned() and not slot.in_use for slot in ahead.slots)
    with OffloadTrace(model) as happened:
        call(model, ids)
    held = torch.cuda.memory_allocated() - happened.peak_resident_bytes
    assert 0 <= held < 2**26, "resident weights and two blocks, and what cuBLAS keeps"


# --- the command


@pytest.mark.parametrize("config", ["tiny", "small"])
def test_the_command(course, config):
    result = course.run(6, "--config", config)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    found = facts(result.stdout)
    assert found["logits_equal"] == found["logits_equal_after_undispatch"] == "True"
    assert int(found["peak_resident_bytes"]) <= int(found["model_bytes"]) * 3 // 4
    assert "encoder.layers.1: meta -> cpu -> meta bytes=199936" in result.stdout or config == "small"
