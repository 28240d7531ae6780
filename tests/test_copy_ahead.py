"""The next block is copied while one computes, on a pretend GPU whose copies and computes are as late as they can be.

Whoever forgets to wait gets wrong numbers there, each time. Each test is a process of its own.
"""

import pytest
from test_pretend_gpu import run

PRELUDE = """
import copy, gc, threading, time, weakref
from notebooks.pretend_gpu import LOG, late
from step06_hooks_offload import hooks_offload as step06

class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.norm = nn.Linear(width, 4 * width), nn.LayerNorm(4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)))

class Blocks(nn.Module):
    def __init__(self, count=5, make=Block):
        super().__init__()
        self.layers, self.order = nn.ModuleList(make() for _ in range(count)), range(count)

    def forward(self, x):
        for number in self.order:
            x = self.layers[number](x)
        return x

torch.manual_seed(0)
x = torch.randn(4, 16)
LATE = [(), ("copies",), ("computes",), ("copies", "computes")]
MODES = [torch.no_grad, torch.inference_mode]

def pair(plain=None, **options):
    plain = (Blocks() if plain is None else plain).eval()
    return plain, copy_ahead(cpu_offload(copy.deepcopy(plain), 0, **options))

def check(plain, ours, *inputs):
    for kinds in LATE:
        for mode in MODES:
            with mode(), late(*kinds):
                expected, got = plain(*inputs), ours(*inputs)
            assert torch.equal(got, expected), (kinds, mode)

def ahead_of(model):
    return next(hook.ahead for module in model.modules() for hook in align_hooks(module) if hook.ahead)

def on_the_cpu(model):
    ahead = CopyAhead([align_hooks(layer)[0] for layer in model.layers], torch.device("cpu"))
    for layer in model.layers:
        align_hooks(layer)[0].ahead = ahead
    return ahead

def copied(model, *inputs):
    LOG.clear()
    with torch.inference_mode():
        model(*inputs)
    return [transfer.bytes for transfer in LOG if transfer.target == "gpu:0" and transfer.bytes != inputs[0].nbytes]
"""


def check(code):
    return run(PRELUDE + code)


@pytest.mark.parametrize(
    "device_map", [{"": 0, "encoder": "cpu"}, {"": "cpu"}, {"": 0, "encoder.layers.1": "cpu"}], ids=str
)
def test_the_course_model_computes_the_same_however_late_things_are(device_map):
    check(f"""
dispatch_model(model, {device_map!r}, main_device=0)
copy_ahead(model)
for _ in range(2):
    check(build_model("tiny"), model, ids)
""")


def test_each_block_is_copied_once_and_memory_is_two_blocks():
    check("""
plain, ours = pair()
size = sum(aligned(p.nbytes) for p in plain.layers[0].parameters())
assert copied(ours, x) == [size] * 6  # the first time, one more: the first one of the next forward
assert copied(ours, x) == [size] * 5
with OffloadTrace(ours) as happened, torch.inference_mode():
    ours(x)
assert happened.peak_resident_bytes == 2 * size
assert [(e.kind, e.block[-1]) for e in happened.events if e.bytes][:8] == [
    ("run", "0"), ("drop", "0"), ("end", "0"), ("bring", "1"),
    ("run", "1"), ("drop", "1"), ("end", "1"), ("bring", "2")]
for count in (1, 2):  # they stay in the slots
    few = copy_ahead(cpu_offload(Blocks(count), 0))
    copied(few, x)
    assert copied(few, x) == []
""")


def test_another_order_a_skipped_block_a_block_twice():
    check("""
plain, ours = pair()
check(plain, ours, x)
for order in ([4, 3, 2, 1, 0], [0, 2, 4], [1, 1, 3, 1], [2], [0, 1, 2, 3, 4]):
    plain.order = ours.order = order
    for _ in range(2):
        check(plain, ours, x)
    if len(set(order)) == len(order) > 2:
        assert len(copied(ours, x)) == len(order), "the order was not learnt"
""")


def test_blocks_of_several_sizes_dtypes_and_of_buffers_only():
    check("""
class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(16))
        self.register_buffer("flags", torch.arange(16) % 3 > 0)

    def forward(self, x):
        return torch.where(self.flags, x * self.table, x)

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.odd, self.scale = nn.Linear(16, 3).double(), nn.Parameter(torch.randn(()).bfloat16())
        self.turned = nn.Parameter(torch.randn(16, 3).T)

    def forward(self, x):
        return x + (self.odd(x.double()).float() @ self.turned) * self.scale

kinds = iter([Block, Table, Half, Table, Half, Block])
plain, ours = pair(Blocks(6, lambda: next(kinds)()), offload_buffers=True)
check(plain, ours, x)
assert len(copied(ours, x)) == 6
""")


def test_what_changed_in_ram_since_it_was_copied_is_copied_anew():
    check("""
plain, ours = pair()
check(plain, ours, x)
hook = align_hooks(ours.layers[0])[0]
hook.weights_map["layers.0.up.weight"].mul_(2)  # in place, after it was copied for the next forward
plain.layers[0].up.weight.mul_(2)
check(plain, ours, x)
hook.weights_map["layers.0.down.bias"] = torch.ones(16)
plain.layers[0].down.bias.fill_(1)
check(plain, ours, x)
with align_module_device(ours.layers[0]):
    ours.layers[0].norm.weight.fill_(3)
plain.layers[0].norm.weight.fill_(3)
check(plain, ours, x)
""")


def test_what_a_forward_changes_is_kept():
    check("""
plain = Blocks(3, lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16)))
offloaded = cpu_offload(copy.deepcopy(plain), 0, offload_buffers=True)
ours = copy_ahead(offloaded)
plain.train(), ours.train()
for kinds in LATE:
    for mode in MODES:
        with mode(), late(*kinds):
            assert torch.equal(plain(x), ours(x))
for name, tensor in ours.state_dict().items():
    assert torch.equal(tensor, plain.state_dict()[name]), name
""")


def test_an_exception_and_an_interrupt_leave_both_slots_free():
    check("""
plain, ours = pair()
for error in (RuntimeError, KeyboardInterrupt):
    handle = ours.layers[2].norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error()))
    for _ in range(2):
        try:
            ours(x)
        except error:
            pass
        else:
            raise AssertionError("it did not raise")
    handle.remove()
    assert not any(slot.in_use for slot in ahead_of(ours).slots)
    assert all(isinstance(p, Parked) for p in ours.parameters())
    check(plain, ours, x)
""")


def test_more_than_two_blocks_at_once_gradients_copies_and_the_way_back():
    check("""
plain, ours = pair()
check(plain, ours, x)
with align_module_device(ours):
    for mine, right in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.cpu(), right)
check(plain, ours, x)
for one in (plain, ours):  # three at once: each calls the next from within
    for number in (0, 1):
        one.layers[number].norm.register_forward_pre_hook(
            lambda module, args, inner=one.layers[number + 1]: (args[0] + inner(x).sum(),)
        )
check(plain, ours, x)
twin = copy.deepcopy(ours)
with torch.enable_grad():
    assert ahead_of(ours).take(align_hooks(ours.layers[0])[0]) is None
gone = weakref.ref(ahead_of(ours))
undispatch(ours)
del twin
check(plain, ours, x)
gc.collect()
assert gone() is None
""")


def test_several_threads():
    check("""
plain, ours = pair()
inputs = [torch.randn(4, 16) for _ in range(4)]
expected, got = [plain(i) for i in inputs], {}
step06.view_as = lambda *args: (time.sleep(0.0005), view_as(*args))[1]  # long enough for others to come between

def work(number):
    with torch.inference_mode():
        for _ in range(5):
            got[number] = ours(inputs[number])

threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert all(torch.equal(got[n], expected[n]) for n in range(4))
""")


def test_tied_blocks_and_a_tie_to_what_is_resident():
    check("""
plain = Blocks()
plain.layers[3].up.weight = plain.layers[1].up.weight
device_map = {"layers.0": 0, "layers.1": 0, "layers.2": "cpu", "layers.3": "cpu", "layers.4": "cpu"}
ours = copy_ahead(dispatch_model(copy.deepcopy(plain), device_map))
check(plain, ours, x)
tied = plain.layers[1].up.weight
assert sum(copied(ours, x)) == 3 * sum(aligned(p.nbytes) for p in plain.layers[0].parameters()) - aligned(tied.nbytes)
""")


def test_from_a_file_and_a_file_that_goes(tmp_path):
    check(f"""
from pathlib import Path
from step02_checkpoint.build_checkpoint import CheckpointError, save_sharded_checkpoint
from step03_meta_build.meta_build import init_empty_weights
from step07_disk_offload.disk_offload import load_checkpoint_and_dispatch, read_ahead
plain, folder = Blocks(), Path({str(tmp_path)!r}) / "c"
save_sharded_checkpoint(plain.state_dict(), folder)
with init_empty_weights():
    empty = Blocks()
device_map = {{"layers.0": 0, "layers.1": "disk", "layers.2": "cpu", "layers.3": "disk", "layers.4": "disk"}}
ours = copy_ahead(read_ahead(load_checkpoint_and_dispatch(empty, folder, device_map)))
check(plain, ours, x)
assert len(copied(ours, x)) == 4
save_sharded_checkpoint({{n: t * 2 for n, t in plain.state_dict().items()}}, folder)
plain.order = ours.order = [0, 1, 2]  # the file of the block that would be next is not asked for
assert torch.equal(ours(x), plain(x))
ours.order = range(5)
try:
    ours(x)
except CheckpointError as error:
    assert "cannot read layers." in str(error) and "has changed" in str(error), error
else:
    raise AssertionError("a file that has changed was read")
""")


def test_an_output_that_is_a_weight_stays_what_it_was():
    """On the CPU, whose tensors share memory as a real accelerator's do."""
    check("""
class Position(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 16))

    def forward(self, x):
        return self.table[: len(x)]

torch.Tensor.record_stream = lambda tensor, stream: None
plain = Blocks(4, Position)
ours = cpu_offload(copy.deepcopy(plain), "cpu")
on_the_cpu(ours)
for mode in MODES:
    with mode():
        rows = [layer(x) for layer in ours.layers]
        for row, layer in zip(rows, plain.layers, strict=True):
            assert torch.equal(row, layer(x))
norms = Blocks(3, lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16)))
offloaded = cpu_offload(norms, "cpu", offload_buffers=True)
on_the_cpu(norms)
before = dict(align_hooks(norms.layers[0])[0].weights_map)
norms.train()(x)
after = align_hooks(norms.layers[0])[0].weights_map
changed = {name for name in before if after[name] is not before[name]}
assert changed == {name for name, _ in norms.named_buffers()}, "what did not change was written back"
plain, _ = pair()
blocks = cpu_offload(copy.deepcopy(plain), "cpu")
ahead = on_the_cpu(blocks)
rooms = [slot.room.data_ptr() for slot in ahead.slots]
for mode in [*MODES, torch.no_grad]:  # what was copied in inference mode is read outside of it
    with mode():
        for _ in range(2):
            assert torch.equal(blocks(x), plain(x))
            assert [slot.room.data_ptr() for slot in ahead.slots] == rooms, "a room was given away for nothing"
""")


def test_where_nothing_can_be_copied_beside_the_compute_blocks_are_brought_as_before():
    check("""
offloaded = copy_ahead(cpu_offload(Blocks(), "cpu"))
assert all(hook.ahead is None for layer in offloaded.layers for hook in align_hooks(layer))
""")
