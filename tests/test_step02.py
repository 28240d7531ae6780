"""Step 2: checkpoints are written whole, and read with suspicion."""

import json
import os
import pickle
import stat
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

from step01_model_def.model_def import CONFIGS
from step02_checkpoint import build_checkpoint as step02
from step02_checkpoint.build_checkpoint import (
    INDEX_NAME,
    CheckpointError,
    build_model,
    ensure_checkpoint,
    find_aliases,
    load_config,
    load_pt,
    parse_size,
    plan_shards,
    read_index,
    recover_folder,
    replace_folder,
    save_sharded_checkpoint,
    tensor_files,
    write_safetensors,
    write_whole,
)


@pytest.fixture
def artifacts(tmp_path, monkeypatch):
    monkeypatch.setattr(step02, "ARTIFACTS", tmp_path / "artifacts")
    return tmp_path / "artifacts"


def read_all(folder):
    """Read a sharded checkpoint with the library alone."""
    weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    tensors = {}
    for file in set(weight_map.values()):
        tensors |= safetensors.torch.load_file(folder / file)
    return tensors


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# --- sizes and shards


@pytest.mark.parametrize(
    ("text", "size"),
    [(4096, 4096), ("4096", 4096), ("1KB", 1000), ("1KiB", 1024), ("1.5GB", 1_500_000_000), ("10GiB", 10 * 2**30),
     (" 2 mib ", 2 * 2**20), ("1TB", 10**12), ("7B", 7), ("0", 0)],
)  # fmt: skip
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1 G", "nan", True, None, 1e30, [], "1GBB", "1iB"])
def test_parse_size_refuses_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_shards_are_filled_in_order():
    sizes = {"a": 60, "b": 50, "c": 50, "d": 200, "e": 0, "f": 100}
    assert plan_shards(sizes, 100) == [["a"], ["b", "c"], ["d"], ["e", "f"]]
    assert plan_shards({}, 100) == []


def test_what_is_written_is_what_was_given(tmp_path):
    state_dict = build_model("tiny").state_dict()
    index = save_sharded_checkpoint(state_dict, tmp_path / "c", "200KB")
    assert index == json.loads((tmp_path / "c" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == 4 * 159298
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    assert names_in(tmp_path / "c") == [*files, INDEX_NAME]
    stored = read_all(tmp_path / "c")
    assert stored.keys() == state_dict.keys()
    assert all(torch.equal(stored[name], state_dict[name]) for name in stored)
    for file in files:
        held = safetensors.torch.load_file(tmp_path / "c" / file)
        assert sum(tensor.nbytes for tensor in held.values()) <= 200_000 or len(held) == 1


def test_unusual_tensors_come_back_bit_for_bit(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    complex_numbers = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state_dict = {
        "bfloat16": torch.randn(3).bfloat16(), "scalar": torch.tensor(7.5), "transposed": base.T, "base": base,
        "part": base[1:3], "row": base[0], "strided": torch.arange(9)[::2], "empty": torch.empty(0, 4),
        "float8": torch.randn(5).to(torch.float8_e4m3fn), "bool": torch.tensor([True, False]),
        "int64": torch.tensor([2**62, -1]), "complex64": complex_numbers, "conj": complex_numbers.conj(),
        "imag": complex_numbers.conj().imag, "expanded": torch.ones(1).expand(3), "parameter": nn.Parameter(base),
    }  # fmt: skip
    save_sharded_checkpoint(state_dict, tmp_path / "c", 100)
    stored, aliases = read_all(tmp_path / "c"), tensor_files(tmp_path / "c")[1]
    assert aliases == {"parameter": "base"}
    for name, tensor in state_dict.items():
        back = stored[aliases.get(name, name)]
        assert back.dtype == tensor.dtype and back.shape == tensor.shape
        assert back.tolist() == tensor.tolist(), name


def test_a_conjugate_that_is_only_a_flag_is_stored_conjugated(tmp_path):
    numbers = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    save_sharded_checkpoint({"conj": numbers.conj(), "negative": numbers.conj().imag}, tmp_path / "c")
    save_sharded_checkpoint({"conj": numbers.conj()}, tmp_path / "d")
    assert read_all(tmp_path / "c")["conj"].tolist() == read_all(tmp_path / "d")["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert read_all(tmp_path / "c")["negative"].tolist() == [-2, 4]


def test_l8_a_tied_tensor_is_written_once_and_its_alias_recorded(tmp_path):
    embedding, head = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
    head.weight = embedding.weight
    state_dict = nn.ModuleDict({"embedding": embedding, "head": head}).state_dict()
    index = save_sharded_checkpoint(state_dict, tmp_path / "c")
    assert index["metadata"]["total_size"] == 100 * 8 * 4
    files, aliases = tensor_files(tmp_path / "c")
    assert list(files) == ["embedding.weight"] and aliases == {"head.weight": "embedding.weight"}
    assert (tmp_path / "c" / "model-00001-of-00001.safetensors").stat().st_size < 2 * 100 * 8 * 4


def test_aliases_are_whole_views_of_the_same_memory_only():
    a = torch.zeros(4, 4)
    c = torch.zeros(2, dtype=torch.complex64)
    assert find_aliases({"a": a, "same": a.view(4, 4), "row": a[0], "transposed": a.T}) == {"same": "a"}
    assert find_aliases({"c": c, "conj": c.conj()}) == {}
    assert find_aliases({"e": torch.empty(0), "f": torch.empty(0)}) == {}
    assert find_aliases({"x": torch.zeros(4), "y": torch.zeros(4)}) == {}


def test_everything_that_cannot_be_stored_is_said_before_anything_is_written(tmp_path):
    state_dict = {
        "on.meta": torch.empty(2, device="meta"), "step": 3, "sparse": torch.eye(2).to_sparse(),
        "wide": torch.zeros(2, dtype=torch.complex128), "nibbles": torch.empty(2, dtype=torch.uint4),
        "__metadata__": torch.zeros(2), "good": torch.zeros(2),
    }  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        save_sharded_checkpoint(state_dict, tmp_path / "c", max_shard_size=0)
    for part in ["on.meta", "step: of type int", "sparse", "complex128", "uint4", "__metadata__", "max_shard_size=0"]:
        assert part in str(caught.value)
    assert "good" not in str(caught.value)
    assert names_in(tmp_path) == []


# --- whole or not at all


def test_a_second_checkpoint_leaves_no_stale_shard_and_keeps_other_files(tmp_path):
    folder = tmp_path / "c"
    save_sharded_checkpoint(build_model("tiny").state_dict(), folder, "100KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub" / "more.txt").write_text("kept")
    for other in ("model_ema.safetensors", "sub/model.safetensors", f"sub/{INDEX_NAME}"):
        (folder / other).write_text("of another model")
    (folder / "tokenizer.json").chmod(0o444)
    (folder / "model.safetensors").write_bytes(b"an older single file")
    save_sharded_checkpoint({"a": torch.ones(2)}, folder)
    assert names_in(folder) == [
        "model-00001-of-00001.safetensors", INDEX_NAME, "model_ema.safetensors", "sub", "tokenizer.json",
    ]  # fmt: skip
    assert names_in(folder / "sub") == ["model.safetensors", INDEX_NAME, "more.txt"]
    assert (folder / "sub" / "more.txt").read_text() == "kept"
    assert names_in(tmp_path) == ["c"]


def test_the_library_reads_what_is_written_and_each_tensor_begins_aligned(tmp_path):
    tensors = {
        "odd": torch.randn(3),
        "even": torch.randn(4, 16),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    for name, dtype in step02.DTYPES.items():
        tensors[name] = torch.arange(64, dtype=torch.uint8).view(dtype).reshape(2, -1)
    write_safetensors(tensors, tmp_path / "x.safetensors", {"format": "pt", "näme": "odd"})
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        bits = [t.reshape(-1).view(torch.uint8) for t in (loaded[name], tensor)]
        assert torch.equal(*bits), name
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "näme": "odd"}
    header, _ = step02.read_header(tmp_path / "x.safetensors")
    starts = {name: entry["data_offsets"][0] % step02.ALIGNMENT for name, entry in header.items()}
    assert {name for name, start in starts.items() if start} <= {"scalar"}  # it comes after `odd`


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save_sharded_checkpoint({"a": torch.ones(2)}, tmp_path / "c")
    calls = []

    def fails(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        path.write_bytes(b"half")

    monkeypatch.setattr(step02, "write_safetensors", fails)
    with pytest.raises(OSError, match="No space left .* untouched"):
        save_sharded_checkpoint({"b": torch.zeros(2), "c": torch.zeros(2)}, tmp_path / "c", max_shard_size=8)
    assert read_all(tmp_path / "c")["a"].tolist() == [1, 1]
    assert names_in(tmp_path) == ["c"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_killed_between_the_two_renames_the_old_folder_comes_back(tmp_path):
    old, new = tmp_path / "c", tmp_path / "new"
    save_sharded_checkpoint({"a": torch.ones(2)}, old)
    save_sharded_checkpoint({"a": torch.zeros(2)}, new)
    child = os.fork()
    if child == 0:
        renamed = type(new).rename
        type(new).rename = lambda self, target: renamed(self, target) if self == old else os._exit(9)
        replace_folder(new, old)
    os.waitpid(child, 0)
    assert not old.exists()
    recover_folder(old)
    assert read_all(old)["a"].tolist() == [1, 1]
    replace_folder(new, old)
    assert read_all(old)["a"].tolist() == [0, 0] and names_in(tmp_path) == ["c"]


def test_saving_after_a_kill_between_the_renames_keeps_other_files(tmp_path):
    folder = tmp_path / "c"
    save_sharded_checkpoint({"a": torch.ones(2)}, folder)
    (folder / "tokenizer.json").write_text("{}")
    folder.rename(tmp_path / ".c.old")
    save_sharded_checkpoint({"a": torch.zeros(2)}, folder)
    assert names_in(tmp_path) == ["c"] and "tokenizer.json" in names_in(folder)


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "model.pt").write_text("precious")
    with pytest.raises(CheckpointError, match="this is a file"):
        save_sharded_checkpoint({"a": torch.zeros(2)}, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").read_text() == "precious"


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_a_link_to_a_folder_stays_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_sharded_checkpoint({"a": torch.ones(2)}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and INDEX_NAME in names_in(tmp_path / "real")


def test_two_writers_do_not_share_their_unfinished_folder(tmp_path):
    with write_whole(tmp_path / "f") as partial:
        partial.write_text("mine")
        other = "from pathlib import Path; from step02_checkpoint.build_checkpoint import write_whole\n"
        other += f"with write_whole(Path({str(tmp_path / 'f')!r})) as partial: partial.write_text('theirs')"
        subprocess.run([sys.executable, "-c", other], check=True)
        assert partial.read_text() == "mine" and (tmp_path / "f").read_text() == "theirs"
    assert (tmp_path / "f").read_text() == "mine" and names_in(tmp_path) == ["f"]


def test_a_mapping_that_makes_its_tensors_anew_is_stored_right(tmp_path):
    class Lazy(dict):
        def __getitem__(self, name):
            return super().__getitem__(name).clone()

        def items(self):
            return ((name, self[name]) for name in self)

    lazy = Lazy({str(i): torch.full((300, 300), float(i)) for i in range(6)})
    save_sharded_checkpoint(lazy, tmp_path)
    assert {name: tensor[0, 0].item() for name, tensor in read_all(tmp_path).items()} == {str(i): i for i in range(6)}


def test_killed_after_both_renames_the_new_folder_stays(tmp_path):
    save_sharded_checkpoint({"a": torch.zeros(2)}, tmp_path / "c")
    (tmp_path / ".c.old").mkdir()
    recover_folder(tmp_path / "c")
    assert names_in(tmp_path) == ["c"] and read_all(tmp_path / "c")["a"].tolist() == [0, 0]


def test_write_whole_replaces_a_file_or_leaves_it(tmp_path):
    path = tmp_path / "deep" / "f.txt"
    with write_whole(path) as partial:
        partial.write_text("old")
    (tmp_path / "deep" / ".f.txt.999999999.partial").write_text("from a killed run")
    with pytest.raises(KeyboardInterrupt), write_whole(path) as partial:
        partial.write_text("new")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and names_in(path.parent) == ["f.txt"]


@pytest.mark.skipif(os.name != "posix", reason="permission bits as POSIX has them")
def test_shards_can_be_read_by_whoever_can_read_the_index(tmp_path):
    save_sharded_checkpoint({"a": torch.ones(2)}, tmp_path / "c")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "c").iterdir()}
    assert len(modes) == 1


# --- reading with suspicion


class RunsCode:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path):
    torch.save({"weight": RunsCode(tmp_path / "ran")}, tmp_path / "bad.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="bad.pt is refused: .* run a program"):
        load_pt(tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="plain.pt"):
        load_pt(tmp_path / "plain.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 half a zip"])
def test_a_damaged_pt_names_its_file(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="x.pt is (damaged|refused)"):
        load_pt(tmp_path / "x.pt")


def test_an_old_pt_that_is_no_zip_is_read(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert load_pt(tmp_path / "old.bin")["a"].tolist() == [1, 1]


def test_a_pt_that_holds_something_else_is_refused(tmp_path):
    torch.save({"model": {"a": torch.ones(1)}, "epoch": 3}, tmp_path / "trainer.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="these are not tensors: model, epoch"):
        load_pt(tmp_path / "trainer.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_pt(tmp_path / "list.pt")


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_an_index_cannot_lead_out_of_its_folder(tmp_path):
    folder = tmp_path / "c"
    save_sharded_checkpoint({"a": torch.ones(2)}, folder)
    save_sharded_checkpoint({"a": torch.ones(2)}, tmp_path / "other")
    outside = tmp_path / "other" / "model-00001-of-00001.safetensors"
    (folder / "link.safetensors").symlink_to(outside)
    files = {"a": f"../other/{outside.name}", "b": str(outside), "c": "link.safetensors", "d": "no.safetensors"}
    files |= {"e": "x\0y", "f": ""}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(CheckpointError) as caught:
        read_index(folder / INDEX_NAME)
    assert str(caught.value).count("refused") == 4 and "'no.safetensors' is absent" in str(caught.value)
    assert "'' is absent" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "x", "a": "y"}}',
     "[" * 100_000, "\ud800"],
)  # fmt: skip
def test_an_index_that_is_none_is_refused_by_name(tmp_path, text):
    (tmp_path / INDEX_NAME).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        read_index(tmp_path / INDEX_NAME)


def test_shards_that_do_not_hold_what_the_index_says_are_refused(tmp_path):
    save_sharded_checkpoint({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, max_shard_size=8)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight_map"]["a"] = index["weight_map"]["b"]
    index["weight_map"]["c"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        tensor_files(tmp_path)
    for part in ["a is not in", "a is in", "c is not in"]:
        assert part in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "header too long"])
def test_a_damaged_shard_is_named(tmp_path, damage):
    save_sharded_checkpoint({"a": torch.ones(200)}, tmp_path)
    shard = tmp_path / "model-00001-of-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(
        {"truncated": content[:300], "garbage": os.urandom(300), "header too long": b"\xff" * 8 + content}[damage]
    )
    with pytest.raises(CheckpointError, match=f"{shard.name} is not a whole safetensors file"):
        tensor_files(tmp_path)


def test_two_checkpoints_in_one_folder_are_not_guessed_between(tmp_path):
    with pytest.raises(CheckpointError, match="has neither"):
        tensor_files(tmp_path)
    save_sharded_checkpoint({"a": torch.ones(2)}, tmp_path / "c")
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "c" / "model.safetensors")
    with pytest.raises(CheckpointError, match="has both"):
        tensor_files(tmp_path / "c")
    with pytest.raises(CheckpointError, match="does not exist"):
        tensor_files(tmp_path / "nowhere")


# --- the course's own checkpoint


def test_the_model_is_seeded_and_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = build_model("tiny")
    assert torch.rand(1) == expected
    assert not first.training
    second = build_model("tiny").state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.state_dict().items())
    for wrong in ("giant", "huge"):
        with pytest.raises(ValueError, match="choose one of"):
            build_model(wrong)


def test_ensure_checkpoint_builds_once_and_says_so(artifacts, capsys):
    paths = ensure_checkpoint("tiny")
    assert capsys.readouterr().out.count("is missing: building it") == 1
    written = paths.weights.stat().st_mtime_ns
    ensure_checkpoint("tiny")
    assert capsys.readouterr().out == "" and paths.weights.stat().st_mtime_ns == written
    paths.config.unlink()
    ensure_checkpoint("tiny")
    assert "model_config.json is missing" in capsys.readouterr().out
    assert load_config(paths.config) == CONFIGS["tiny"]


def test_other_configurations_do_not_touch_tiny(artifacts):
    tiny, small = step02.checkpoint_paths("tiny"), step02.checkpoint_paths("small")
    assert set(tiny).isdisjoint(small)
    assert tiny.config == artifacts / "model_config.json" and tiny.weights == artifacts / "tiny_transformer.pt"


@pytest.mark.parametrize(
    ("part", "damage"),
    [("config", lambda p: p.write_text("{")), ("config", lambda p: p.write_text("{}")),
     ("config", lambda p: p.write_text(json.dumps(CONFIGS["small"]))),
     ("config", lambda p: p.write_text(json.dumps(CONFIGS["tiny"] | {"num_heads": 0}))),
     ("weights", lambda p: p.write_bytes(p.read_bytes()[:5000])),
     ("shards", lambda p: (p / INDEX_NAME).write_text("no")),
     ("shards", lambda p: (p / INDEX_NAME).unlink()),
     ("shards", lambda p: next(p.glob("*00002-of*")).unlink()),
     ("shards", lambda p: next(p.glob("*00002-of*")).write_bytes(b"x" * 99))],
)  # fmt: skip
def test_a_damaged_checkpoint_names_the_file_and_the_mend(artifacts, part, damage):
    path = getattr(ensure_checkpoint("tiny"), part)
    damage(path)
    with pytest.raises(CheckpointError) as caught:
        ensure_checkpoint("tiny")
    assert path.name in str(caught.value)
    assert "python step02_checkpoint/build_checkpoint.py" in str(caught.value)
    step02.build_checkpoint("tiny")
    ensure_checkpoint("tiny")


def test_config_errors_come_together(tmp_path):
    config = {name: size for name, size in CONFIGS["tiny"].items() if name != "num_heads"} | {"extra": 1}
    (tmp_path / "c.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="extra is unknown; num_heads is missing"):
        load_config(tmp_path / "c.json")


# --- the ecosystem reads it


def test_accelerate_reads_our_shards(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = build_model("tiny")
    save_sharded_checkpoint(model.state_dict(), tmp_path, "200KB")
    other = type(model)(**CONFIGS["tiny"]).eval()
    accelerate.load_checkpoint_in_model(other, tmp_path, strict=True)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())


def test_transformers_reads_our_shards_and_ties_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(tmp_path)
    index = save_sharded_checkpoint(model.state_dict(), tmp_path, "5KB")
    assert "lm_head.weight" not in index["weight_map"] and len(set(index["weight_map"].values())) > 1
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(10).reshape(1, 10)
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_saving_needs_no_more_than_the_state_dict_and_a_shard(tmp_path):
    from step03_meta_build.meta_build import peak_rss_mb

    setup = (
        "import torch; from step02_checkpoint.build_checkpoint import save_sharded_checkpoint\n"
        # 200 MiB that must be copied; each is above 32 MiB, so glibc gives its memory back when it is freed
        "state_dict = {str(i): torch.ones(2**21, 5).T for i in range(5)}\n"
        "save_sharded_checkpoint({'warm': torch.ones(1)}, '%s')" % (tmp_path / "warm")
    )
    assert peak_rss_mb(f"save_sharded_checkpoint(state_dict, '{tmp_path / 'c'}', '40MiB')", setup) < 60
