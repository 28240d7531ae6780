"""Step 3: the meta build, in every situation in which Accelerate's context has failed somebody."""

import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from step01_model_def.model_def import CONFIGS, TinyTransformerClassifier, count_meta_parameters
from step02_checkpoint.build_checkpoint import build_model, save_sharded_checkpoint
from step03_meta_build.meta_build import (
    build_empty,
    dress,
    error_of,
    init_empty_weights,
    init_on_device,
    measure_rss,
    innermost,
    peak_rss_mb,
    rss_mb,
    structure,
)


def hooks():
    module = nn.modules.module
    return dict(module._global_parameter_registration_hooks), dict(module._global_buffer_registration_hooks)


@pytest.fixture(autouse=True)
def everything_is_as_before():
    before, register = hooks(), nn.Module.register_parameter
    yield
    assert hooks() == before and innermost.get() is None and nn.Module.register_parameter is register
    assert not nn.Linear(1, 1).weight.is_meta


def test_the_meta_model_is_the_real_one_without_its_values():
    model = build_empty("tiny")
    assert structure(model) == structure(build_model("tiny"))
    assert count_meta_parameters(model) == 40 and not model.training


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.MultiheadAttention, nn.TransformerDecoderLayer, nn.Bilinear])
def test_other_modules_build_too(kind):
    sizes = (4, 4, 4) if kind is nn.Bilinear else (4, 2)
    with init_empty_weights():
        model = kind(*sizes)
    assert structure(model) == structure(kind(*sizes))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_buffers_stay_real_unless_asked():
    with init_empty_weights():
        norm = nn.BatchNorm1d(3)
    assert norm.weight.is_meta and norm.running_var.tolist() == [1, 1, 1]
    with init_empty_weights(include_buffers=True):
        norm = nn.BatchNorm1d(3)
    assert norm.weight.is_meta and norm.running_var.is_meta
    assert norm._non_persistent_buffers_set == set() and norm.num_batches_tracked.dtype == torch.int64


class Tied(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        if weight is not None:
            self.first.weight = weight
        self.second.weight = self.first.weight


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_m1_a_tie_made_inside_is_one_parameter(device):
    with init_on_device(device):
        assert len(list(Tied().parameters())) == 1


def test_m1_a_tie_to_a_parameter_made_outside_is_one_parameter():
    shared = nn.Parameter(torch.randn(4, 4))
    with init_empty_weights():
        one, two = Tied(shared), Tied(shared)
    assert len({id(p) for p in [*one.parameters(), *two.parameters()]}) == 1
    assert one.first.weight.is_meta and not shared.is_meta


class MovesItself(nn.Module):
    def __init__(self, move):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        move(self)


@pytest.mark.parametrize(
    "move",
    [lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.to(torch.device("cpu"), torch.float16),
     lambda m: m.half(), lambda m: m.to(device="cpu", dtype=torch.float16), lambda m: m.to(torch.zeros(1).half())],
)  # fmt: skip
def test_m2_a_constructor_may_move_itself(move):
    real = MovesItself(move)
    with init_empty_weights():
        model = MovesItself(move)
    assert model.inner.weight.is_meta
    assert structure(model) == structure(real)


def test_m2_a_dtype_taken_from_another_tensor_is_kept():
    with init_empty_weights():
        weight = nn.Linear(2, 2).weight
        assert weight.to(torch.zeros(1).half()).dtype == torch.float16


def test_m2_moving_a_real_tensor_inside_still_moves_it():
    with init_empty_weights():
        assert torch.ones(2).to("cpu", torch.float16).dtype == torch.float16
        assert torch.ones(2).to("meta").is_meta


def test_moving_a_finished_meta_model_still_fails():
    assert "Cannot copy out of meta tensor" in error_of(build_empty("tiny").to, "cpu")
    with pytest.raises(RuntimeError, match="should have failed"):
        error_of(nn.Linear(1, 1).to, "cpu")


def test_only_the_thread_that_entered_is_affected():
    inside, leave, devices = threading.Event(), threading.Event(), {}

    def other():
        inside.wait(10)
        devices["other"] = nn.Linear(2, 2).weight.device.type
        leave.set()

    thread = threading.Thread(target=other)
    thread.start()
    with init_empty_weights():
        inside.set()
        assert leave.wait(10)
        devices["mine"] = nn.Linear(2, 2).weight.device.type
    thread.join()
    assert devices == {"other": "cpu", "mine": "meta"}


def test_two_threads_may_enter_and_leave_in_any_order():
    steps = [threading.Event() for _ in range(3)]
    devices = []

    def first():
        with init_empty_weights():
            steps[0].set()
            assert steps[1].wait(10)
        devices.append(nn.Linear(2, 2).weight.device.type)  # left while the second is still inside
        steps[2].set()

    def second():
        assert steps[0].wait(10)
        with init_empty_weights():
            steps[1].set()
            assert steps[2].wait(10)
            devices.append(nn.Linear(2, 2).weight.device.type)

    threads = [threading.Thread(target=target) for target in (first, second)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert devices == ["cpu", "meta"]


def test_many_threads_build_at_once():
    """Adding and removing hooks while others build raised `OrderedDict mutated during iteration`."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors = []

    def build(context):
        try:
            for _ in range(150):
                with context():
                    assert nn.Linear(2, 2).weight.is_meta == (context is init_empty_weights)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=build, args=[context]) for context in [init_empty_weights, nullcontext] * 2]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    sys.setswitchinterval(interval)
    assert errors == []


def test_contexts_nest_and_the_innermost_decides():
    with init_empty_weights():
        with init_on_device("cpu", include_buffers=True):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
        with init_empty_weights(include_buffers=True):
            norm = nn.BatchNorm1d(2)
        assert not nn.BatchNorm1d(2).running_mean.is_meta
    assert not inner.weight.is_meta and outer.weight.is_meta and norm.running_mean.is_meta


def test_an_exception_inside_is_the_callers_and_nothing_is_left():
    with pytest.raises(ZeroDivisionError), init_empty_weights(include_buffers=True):
        raise ZeroDivisionError


class Special(nn.Parameter):
    pass


def test_class_attributes_and_requires_grad_are_kept():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.special = Special(torch.randn(3), requires_grad=False)
            self.marked = nn.Parameter(torch.randn(3))
            self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
            made = nn.Parameter(torch.randn(3))
            made.axis = "row"
            self.with_attribute = made
            self.nothing = None
            self.register_parameter("absent", None)

    with init_empty_weights():
        model = Model()
    assert type(model.special) is Special and not model.special.requires_grad
    assert type(model.marked) is nn.Parameter and model.marked.requires_grad and model.marked.is_leaf
    assert model.counts.dtype == torch.int64 and model.with_attribute.axis == "row" and model.absent is None
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_lazy_modules_stay_lazy():
    with init_empty_weights():
        lazy = nn.LazyLinear(3)
    assert lazy(torch.ones(2, 5)).shape == (2, 3)


def test_no_random_numbers_are_drawn():
    before = torch.get_rng_state()
    build_empty("tiny")
    with torch.device("meta"):
        TinyTransformerClassifier(**CONFIGS["tiny"])
    assert torch.equal(before, torch.get_rng_state())


def test_giant_takes_no_memory():
    setup = "from step03_meta_build.meta_build import *; warm_up()"
    assert peak_rss_mb("model = build_empty('giant')", setup) < 100


def test_a_peak_is_measured_though_the_memory_is_given_back():
    assert 190 < peak_rss_mb("import torch; torch.ones(50, 2**20); torch.ones(10)", "import torch") < 260


def test_a_large_parent_does_not_make_its_child_seem_large():
    ballast = bytearray(400 * 2**20)
    assert rss_mb() > 400
    assert peak_rss_mb("pass") < 50
    del ballast


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells file-backed memory apart")
def test_file_backed_memory_is_told_apart(tmp_path):
    setup = f"import torch; torch.save(torch.ones(25, 2**20), '{tmp_path / 'x.pt'}')"
    growth = measure_rss(f"x = torch.load('{tmp_path / 'x.pt'}', mmap=True, weights_only=True); x.sum()", setup)
    assert 90 < growth["peak_mb"] < 130 and 90 < growth["file_mb"] < 110 and growth["anonymous_mb"] < 20
    assert growth["curve"] and growth["curve"][-1][1] > 50


def test_a_failing_measurement_shows_the_childs_error():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        measure_rss("1 / 0")


class Odd(nn.Parameter):
    """A parameter of a class of its own."""


@pytest.mark.parametrize(
    "like", [nn.Parameter(torch.ones(4)), Odd(torch.ones(4)), torch.ones(4)], ids=lambda t: type(t).__name__
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_dressed_tensor_is_no_view(like, mode):
    """A slice of a view requires no grad, and PyTorch then takes another kernel for a product: another last bit."""
    with torch.inference_mode(False), mode():
        new = dress(torch.zeros(4), like)
    assert type(new) is type(like) and new.requires_grad == like.requires_grad and not new._is_view()
    for inference in (torch.no_grad, torch.inference_mode):
        if not new.is_inference():
            with inference():
                assert new[:2].requires_grad == like[:2].requires_grad


@pytest.mark.parametrize(
    "module", ["nn.Embedding(4, 4)", "nn.MultiheadAttention(4, 2)", "nn.Linear(2, 2).weight.data.normal_()"]
)
def test_a_meta_build_loads_no_compiler(module):
    """PyTorch's `normal_` of a meta tensor loads it: a second, and 70 MiB, in each process that builds a model."""
    build = f"with init_empty_weights():\n    {module}\nassert 'torch._dynamo' not in sys.modules"
    peak_rss_mb(f"import sys\nfrom torch import nn\n{build}", "from step03_meta_build.meta_build import *")


def test_loading_and_running_load_no_compiler_and_no_symbols(tmp_path):
    """`torch.empty_like` of a meta tensor imports sympy, `torch.compiler.disable` the compiler: 100 MiB together."""
    save_sharded_checkpoint(build_model("tiny").state_dict(), tmp_path / "c")
    load = "load_checkpoint_and_dispatch(build_empty('tiny'), folder, {'': 'cpu', 'encoder': 'disk'})"
    forward = "with torch.inference_mode():\n    model(fixed_sequences(128))"
    check = "assert not {'torch._dynamo', 'sympy'} & set(sys.modules)"
    setup = f"import sys\nfrom step07_disk_offload.disk_offload import *\nfolder = Path({str(tmp_path / 'c')!r})"
    build = "from step03_meta_build.meta_build import build_empty"
    peak_rss_mb(f"model = {load}\n{forward}\n{check}", f"{setup}\n{build}")
