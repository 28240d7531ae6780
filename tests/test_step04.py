"""Step 4: what is loaded is right, or nothing changes and the error says everything."""

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

from step01_model_def.model_def import CONFIGS, TinyTransformerClassifier, fixed_sequences
from step02_checkpoint.build_checkpoint import CheckpointError, build_model, save_sharded_checkpoint
from step03_meta_build.meta_build import build_empty, init_empty_weights, init_on_device
from step04_to_empty_load.load_with_meta import (
    TiedModel,
    check_no_meta_tensors,
    empty_tied_model,
    find_tied_parameters,
    load_strict,
    materialize,
    retie_parameters,
    run,
    unfillable_buffers,
)


@pytest.fixture
def normal():
    torch.manual_seed(0)
    return TiedModel()


def outputs(model):
    with torch.inference_mode():
        return model(fixed_sequences(16))


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    """Without this, a tensor that nothing filled may hold the right values by accident."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# --- ties


def test_ties_are_found_on_real_and_meta_models(normal):
    assert find_tied_parameters(normal) == [["embedding.weight", "head.weight"]]
    assert find_tied_parameters(empty_tied_model()) == [["embedding.weight", "head.weight"]]
    assert find_tied_parameters(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_ties_in_shared_modules_and_buffers():
    norm = nn.BatchNorm1d(2)
    groups = find_tied_parameters(nn.Sequential(norm, nn.ReLU(), norm))
    assert ["0.weight", "2.weight"] in groups and ["0.running_mean", "2.running_mean"] in groups


def test_find_tied_parameters_agrees_with_accelerate(normal):
    accelerate = pytest.importorskip("accelerate")
    layer = nn.Linear(3, 3)
    for model in (normal, nn.Sequential(layer, nn.Linear(3, 3), layer), nn.Linear(2, 2)):
        theirs = accelerate.utils.find_tied_parameters(model)
        assert sorted(map(sorted, find_tied_parameters(model))) == sorted(map(sorted, theirs))


def test_retie_keeps_the_tensor_that_is_real(normal):
    real = normal.head.weight
    normal.embedding.weight = nn.Parameter(torch.empty(16, 8, device="meta"))
    retie_parameters(normal, [["embedding.weight", "head.weight"]])
    assert normal.embedding.weight is real is normal.head.weight


# --- materialize


def test_m4_a_real_table_survives(normal):
    model = materialize(empty_tied_model(), "cpu")
    assert torch.equal(model.table, normal.table)
    model.load_state_dict(normal.state_dict())
    assert torch.equal(outputs(model), outputs(normal))
    broken = empty_tied_model().to_empty(device="cpu")
    broken.load_state_dict(normal.state_dict())
    assert not torch.equal(outputs(broken), outputs(normal)), "the test would not see a lost table"


def test_m5_tied_weights_stay_one_storage():
    with init_empty_weights():
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
    model = materialize(nn.Sequential(first, second), "cpu")
    assert model[0].weight is model[1].weight and not model[0].weight.is_meta
    assert model[0].weight.untyped_storage().data_ptr() == model[1].weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("how", [lambda model: materialize(model, "cpu"), lambda model: load_strict(model, {})])
def test_m3_a_buffer_that_nothing_fills_is_named_and_nothing_changes(how):
    with init_empty_weights(include_buffers=True):
        model = TiedModel()
    assert unfillable_buffers(model) == ["table"]
    with pytest.raises(ValueError, match="table: a meta buffer that no checkpoint holds"):
        how(model)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_m3_a_buffer_set_by_hand_is_fine(normal):
    with init_empty_weights(include_buffers=True):
        model = TiedModel()
    model.table = normal.table.clone()
    assert torch.equal(outputs(load_strict(model, normal.state_dict())), outputs(normal))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_flat_weights_of_recurrent_modules_follow(kind):
    real = kind(4, 3, num_layers=2)
    x = torch.randn(5, 2, 4)  # (seq, batch, features)
    for prepare in (lambda model: model, lambda model: materialize(model, "cpu")):
        with init_empty_weights():
            model = kind(4, 3, num_layers=2)
        load_strict(prepare(model), real.state_dict())
        with torch.inference_mode():
            assert torch.equal(model(x)[0], real(x)[0])


# --- load_strict: values


@pytest.fixture(params=["pt", "safetensors", "shards", "index", "state dict"])
def checkpoint(request, tmp_path):
    def write(state_dict):
        if request.param == "pt":
            torch.save(state_dict, tmp_path / "c.pt")
            return tmp_path / "c.pt"
        if request.param == "safetensors":
            stored = {name: tensor.clone() for name, tensor in state_dict.items()}
            safetensors.torch.save_file(stored, tmp_path / "c.safetensors")
            return str(tmp_path / "c.safetensors")
        if request.param == "state dict":
            return state_dict
        save_sharded_checkpoint(state_dict, tmp_path / "c", 200)
        return tmp_path / "c" / ("model.safetensors.index.json" if request.param == "index" else "")

    return write


@pytest.mark.parametrize("build", [TiedModel, empty_tied_model, lambda: materialize(empty_tied_model(), "cpu")])
def test_every_form_of_checkpoint_gives_the_same_model(normal, checkpoint, build):
    torch.manual_seed(1)
    model = load_strict(build(), checkpoint(normal.state_dict()))
    assert torch.equal(outputs(model), outputs(normal))
    assert model.head.weight is model.embedding.weight  # L8: loads tied
    assert model.head.weight.requires_grad and type(model.head.weight) is nn.Parameter


def test_the_courses_model_loads_from_meta_bit_for_bit(checkpoint):
    real = build_model("tiny")
    model = load_strict(build_empty("tiny"), checkpoint(real.state_dict()))
    assert torch.equal(run(model), run(real))


def test_m6_loading_its_own_state_keeps_the_tie(normal):
    before = outputs(normal)
    load_strict(normal, normal.state_dict())
    assert normal.head.weight is normal.embedding.weight and torch.equal(outputs(normal), before)
    normal.load_state_dict(normal.state_dict(), assign=True)
    assert normal.head.weight is not normal.embedding.weight, "PyTorch mended it: simplify load_strict"


def test_m7_what_is_still_on_meta_is_listed(normal):
    model = empty_tied_model()
    with pytest.warns(UserWarning, match="meta"):
        model.load_state_dict(normal.state_dict())
    with pytest.raises(ValueError, match="embedding.weight, head.weight"):
        check_no_meta_tensors(model)
    check_no_meta_tensors(load_strict(model, normal.state_dict()))


def test_a_real_model_is_filled_in_place(normal):
    model = TiedModel()
    weight = model.head.weight
    load_strict(model, normal.state_dict())
    assert model.head.weight is weight and torch.equal(weight, normal.head.weight)


def test_one_name_of_a_tied_tensor_is_enough(normal, checkpoint):
    for kept in ("embedding.weight", "head.weight"):
        model = load_strict(empty_tied_model(), checkpoint({kept: normal.state_dict()[kept]}))
        assert torch.equal(outputs(model), outputs(normal)) and model.head.weight is model.embedding.weight


def test_an_untied_model_does_not_become_tied(normal, checkpoint):
    with init_empty_weights():
        model = nn.ModuleDict({"embedding": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
    load_strict(model, checkpoint(normal.state_dict()))
    with torch.no_grad():
        model["head"].weight.zero_()
    assert torch.equal(model["embedding"].weight, normal.embedding.weight)


def test_dtypes_follow_the_model_and_numbers_stay_what_they_are(checkpoint):
    saved = {"weight": torch.randn(3).half(), "bias": torch.randn(3).double(), "running_mean": torch.zeros(3)}
    saved |= {"running_var": torch.ones(3), "num_batches_tracked": torch.tensor(2**40)}
    with init_empty_weights(include_buffers=True):
        norm = nn.BatchNorm1d(3)
    load_strict(norm, checkpoint(saved))
    assert norm.weight.dtype == norm.bias.dtype == torch.float32
    assert torch.equal(norm.weight, saved["weight"].float()) and norm.num_batches_tracked == 2**40


def test_mapped_weights_may_be_changed_and_the_file_is_not(tmp_path):
    saved = nn.Linear(3, 3)
    save_sharded_checkpoint(saved.state_dict(), tmp_path)
    with init_empty_weights():
        model = nn.Linear(3, 3)
    load_strict(model, tmp_path)
    with torch.no_grad():
        model.weight.zero_()
    with init_empty_weights():
        again = nn.Linear(3, 3)
    assert torch.equal(load_strict(again, tmp_path).weight, saved.weight)


def test_a_loaded_model_outlives_its_file(tmp_path):
    saved = nn.Linear(3, 3)
    save_sharded_checkpoint(saved.state_dict(), tmp_path / "c")
    with init_empty_weights():
        model = nn.Linear(3, 3)
    load_strict(model, tmp_path / "c")
    save_sharded_checkpoint({"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}, tmp_path / "c")
    assert torch.equal(model.weight, saved.weight)


def test_inside_the_context_what_is_loaded_is_real(normal, checkpoint):
    with init_empty_weights():
        loaded = load_strict(TiedModel(), checkpoint(normal.state_dict()))
        made = materialize(TiedModel(), "cpu")
    check_no_meta_tensors(loaded)
    check_no_meta_tensors(made)
    assert torch.equal(outputs(loaded), outputs(normal)) and made.head.weight is made.embedding.weight


class Marked(nn.Parameter):
    pass


def marked_module():
    module = nn.Module()
    module.weight = Marked(torch.ones(3), requires_grad=False)
    module.weight.no_decay = True
    return module


@pytest.mark.parametrize("prepare", [lambda model: model, lambda model: materialize(model, "cpu")])
def test_parameters_keep_class_attributes_and_requires_grad(prepare):
    with init_empty_weights():
        model = marked_module()
    load_strict(prepare(model), {"weight": nn.Parameter(torch.full((3,), 7.0))})
    assert type(model.weight) is Marked and model.weight.no_decay and not model.weight.requires_grad
    assert model.weight.tolist() == [7, 7, 7]


def test_the_checkpoint_gives_values_and_nothing_else(tmp_path):
    source = nn.BatchNorm1d(2)
    state = {name: nn.Parameter(tensor.float()) for name, tensor in source.state_dict().items()}
    state["num_batches_tracked"] = torch.tensor(3)
    torch.save(state, tmp_path / "c.pt")
    for checkpoint in (state, tmp_path / "c.pt"):
        with init_empty_weights(include_buffers=True):
            model = nn.BatchNorm1d(2).half().requires_grad_(False)
        load_strict(model, checkpoint)
        assert not model.weight.requires_grad and not isinstance(model.running_mean, nn.Parameter)
        assert model.running_mean.grad_fn is None and all(p.requires_grad for n, p in state.items() if p.dim())


def test_a_state_dict_is_copied():
    source = nn.Linear(2, 2)
    with init_empty_weights():
        model = nn.Linear(2, 2)
    load_strict(model, source.state_dict())
    with torch.no_grad():
        model.weight.zero_()
    assert source.weight.abs().sum() > 0
    swapped = {"weight": source.weight.T, "bias": source.bias}
    expected = source.weight.T.clone()
    assert torch.equal(load_strict(source, swapped).weight, expected)


def test_what_overlaps_in_the_file_is_apart_in_the_model(tmp_path):
    base = torch.arange(8.0)
    torch.save({"a": base[:4], "b": base[2:6], "c": torch.ones(1).expand(4)}, tmp_path / "c.pt")
    with init_empty_weights():
        model = nn.ParameterDict({name: nn.Parameter(torch.empty(4), requires_grad=False) for name in "abc"})
    load_strict(model, tmp_path / "c.pt")
    model["a"].fill_(99)
    model["c"][0] = 5
    assert model["b"].tolist() == [2, 3, 4, 5] and model["c"].tolist() == [5, 1, 1, 1]


def test_real_tensors_of_a_mixed_model_are_filled_in_place():
    with init_empty_weights():
        norm = nn.BatchNorm1d(2)
    mean = norm.running_mean
    load_strict(norm, nn.BatchNorm1d(2).state_dict() | {"running_mean": torch.full((2,), 5.0)})
    assert norm.running_mean is mean and mean.tolist() == [5, 5]


def test_a_modules_own_migration_does_not_run_on_a_current_checkpoint():
    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            if local_metadata.get("version") is None:
                state_dict[prefix + "weight"] = state_dict[prefix + "weight"] / 2
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    source = Versioned(2, 2)
    assert torch.equal(load_strict(Versioned(2, 2), source.state_dict()).weight, source.weight)


def test_nan_in_a_tied_weight_is_no_difference(normal, checkpoint):
    with torch.no_grad():
        normal.head.weight[0, 0] = float("nan")
    state_dict = {name: tensor.clone() for name, tensor in normal.state_dict().items()}
    assert load_strict(empty_tied_model(), checkpoint(state_dict)).head.weight[0, 0].isnan()


def transformers_model(name, **options):
    """Build a small random model of Transformers; returns it and inputs for it."""
    transformers = pytest.importorskip("transformers")
    attention = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    sizes = {
        "Llama": attention | {"num_key_value_heads": 2, "tie_word_embeddings": True},
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
        "Bert": attention,
        "T5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
    }
    head = {"Llama": "ForCausalLM", "GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "T5": "ForConditionalGeneration"}
    config = getattr(transformers, name + "Config")(vocab_size=64, **sizes[name])
    ids = torch.arange(2, 12).reshape(1, 10)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "T5" else {})
    return getattr(transformers, name + head[name])(config).eval(), inputs


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "T5"])
def test_transformers_models_come_back_bit_for_bit(tmp_path, name):
    source, inputs = transformers_model(name)
    save_sharded_checkpoint(source.state_dict(), tmp_path, "20KB")
    with init_empty_weights():
        empty, to_fill = (type(source)(source.config).eval() for _ in range(2))
    with torch.inference_mode():
        expected = source(**inputs).logits
        for model in (load_strict(empty, tmp_path), load_strict(materialize(to_fill, "cpu"), tmp_path)):
            assert torch.equal(model(**inputs).logits, expected)
            assert find_tied_parameters(model) == find_tied_parameters(source)


# --- load_strict: refusals


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 5)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_l1_l6_everything_wrong_is_in_one_error_and_nothing_changes(tmp_path, device):
    state_dict = Two().state_dict()
    state_dict |= {"l2.weight": torch.zeros(7, 4), "l1.bias": torch.zeros(9), "steps": torch.zeros(2)}
    state_dict["surplus.weight"] = torch.zeros(1)
    del state_dict["l3.bias"], state_dict["l3.weight"]
    save_sharded_checkpoint(state_dict, tmp_path / "c", 150)
    with init_on_device(device):
        model = Two()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_strict(model, tmp_path / "c")
    message = str(caught.value)
    assert "cannot load into Two" in message and message.count("\n") == 6
    for wrong, pieces in {
        "l2.weight": ["[7, 4] in", "model-0000", "wants [5, 4]"], "l1.bias": ["is [9] in", "wants [4]"],
        "steps": ["torch.float32 in", "wants torch.int64"], "surplus.weight": ["unexpected"],
        "l3.bias": ["missing"], "l3.weight": ["missing: l3.weight [5, 5]"],
    }.items():  # fmt: skip
        line = next(line for line in message.splitlines() if wrong in line)
        assert all(piece in line for piece in pieces), line
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta if before[name].is_meta else torch.equal(tensor, before[name])


def test_meta_tensors_in_a_state_dict_are_refused():
    with pytest.raises(CheckpointError, match="no values: weight is on the meta device"):
        load_strict(nn.Linear(2, 2), nn.Linear(2, 2, device="meta").state_dict())


def test_tied_names_with_different_values_are_refused(checkpoint):
    state_dict = {"embedding.weight": torch.zeros(16, 8), "head.weight": torch.ones(16, 8)}
    with pytest.raises(CheckpointError, match="tied: embedding.weight, head.weight"):
        load_strict(empty_tied_model(), checkpoint(state_dict))
    state_dict["head.weight"] = torch.zeros(16, 8)
    load_strict(empty_tied_model(), checkpoint(state_dict))


def test_run_refuses_a_model_that_is_not_loaded():
    with pytest.raises(ValueError, match="classifier.weight"):
        run(build_empty("tiny"))


def test_the_mapped_model_needs_one_copy_and_the_plain_one_two(tmp_path):
    from step03_meta_build.meta_build import peak_rss_mb

    with init_empty_weights():
        size_mb = sum(p.nbytes for p in TinyTransformerClassifier(**CONFIGS["small"]).parameters()) / 2**20
    setup = (
        "from pathlib import Path; from step02_checkpoint import build_checkpoint as two\n"
        f"two.ARTIFACTS = Path('{tmp_path}')\n"
        "from step04_to_empty_load.load_with_meta import *; warm_up()\n"
        "[ensure_checkpoint(name) for name in ('tiny', 'small')]; run(load_plain('tiny')); import gc; gc.collect()"
    )
    peaks = {way: peak_rss_mb(f"model = {way}('small'); run(model)", setup) for way in ("load_plain", "load_mapped")}
    assert peaks["load_mapped"] < 1.3 * size_mb < 1.7 * size_mb < peaks["load_plain"]
