"""The map as a pipeline: each rank reads its own bytes, the numbers are right, and nobody waits for the dead."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, facts

from notebooks import beyond_one_machine as beyond
from step01_model_def.model_def import fixed_sequences
from step02_checkpoint.build_checkpoint import CheckpointError, ensure_checkpoint, save_sharded_checkpoint
from step03_meta_build.meta_build import build_empty
from step04_to_empty_load.load_with_meta import load_strict
from step07_disk_offload import disk_offload

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="torchrun is tested on Linux and macOS")
SCRIPT = ROOT / "notebooks" / "beyond_one_machine.py"


@pytest.fixture(scope="module", autouse=True)
def checkpoints():
    return {name: ensure_checkpoint(name).shards for name in ("tiny", "small")}


def test_the_script_as_a_user_runs_it_in_another_folder(tmp_path):
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    said = facts(result.stdout)
    assert said["logits_equal"] == "True" and said["device_map['encoder.layers.4']"] == "1"
    held = [int(said[f"rank{rank}_bytes"]) for rank in range(2)]
    whole = sum(parameter.nbytes for parameter in build_empty("small").parameters())
    assert sum(held) == whole and all(0.45 < size / whole < 0.55 for size in held)
    if sys.platform == "linux":
        measured = [float(said[f"rank{rank}_anonymous_mb"]) * 2**20 / whole for rank in range(2)]
        assert all(0.4 < share < 0.65 for share in measured), measured
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_runs_under_torchrun_itself(ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run([*command, str(SCRIPT), "--config", "tiny"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and facts(result.stdout)["logits_equal"] == "True", result.stderr


def test_stages_give_the_numbers_of_one_process_and_read_each_tensor_once(checkpoints, monkeypatch):
    read = []

    def counted(file, info, load=disk_offload.load_offloaded_weight):
        read.append(info["weight_name"])
        return load(file, info)

    monkeypatch.setattr(disk_offload, "load_offloaded_weight", counted)
    device_map, x = beyond.plan_ranks("small", 3), fixed_sequences(1000)
    names = []
    with torch.no_grad():
        for rank in range(3):
            read.clear()
            stage = beyond.build_stage("small", device_map, rank)
            assert all(parameter.is_meta for parameter in stage.parameters())
            beyond.load_stage(stage, checkpoints["small"], torch.device("cpu"))
            own = [name for name, _ in stage.named_parameters()]
            assert set(read) == set(own)
            names += own
            x = stage(x)
        assert torch.equal(x, load_strict(build_empty("small"), checkpoints["small"])(fixed_sequences(1000)))
    assert sorted(names) == sorted(name for name, _ in build_empty("small").named_parameters())


def test_a_checkpoint_without_a_part_is_refused_by_name(tmp_path):
    state = {n: torch.zeros(t.shape) for n, t in build_empty("tiny").state_dict().items() if "layers.2.norm1" not in n}
    save_sharded_checkpoint(state, tmp_path)
    device_map = beyond.plan_ranks("tiny", 2)
    beyond.load_stage(beyond.build_stage("tiny", device_map, 0), tmp_path, torch.device("cpu"))
    with pytest.raises(CheckpointError, match="lacks encoder.layers.2.norm1.weight, encoder.layers.2.norm1.bias"):
        beyond.load_stage(beyond.build_stage("tiny", device_map, 1), tmp_path, torch.device("cpu"))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_dies_ends_the_others_and_is_named(lost):
    command = [sys.executable, str(SCRIPT), "--config", "tiny", "--lose", str(lost)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith(f"ValueError: rank {lost} failed first, with exit code 1"), result.stderr


@pytest.mark.parametrize("lost", [0, 1])
def test_without_torchrun_too_the_others_notice(lost):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, str(SCRIPT), "--config", "tiny", "--lose", str(lost)]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    left = said[1 - lost].strip().splitlines()[-1]
    assert "lost another rank" in left or "onnect" in left, said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "ValueError: ranks=0: give 1 or more"),
        (
            ["--config", "tiny", "--ranks", "5"],
            "ValueError: tiny is not cut into 5 parts; the most, up to there, is --ranks 2",
        ),
        (["--lose", "2"], "ValueError: lose=2: the ranks are 0 to 1"),
    ],
)
def test_a_slip_is_refused_before_anything_starts(options, message):
    result = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stdout == "" and result.stderr.startswith(message)


def test_when_offloading_pays():
    parameters, moved = 1000, 2000
    at = beyond.smallest_batch_that_pays(moved, 10, parameters, 1e6)
    assert at == 1e5 and beyond.tokens_per_second(moved, 10, parameters, 1e6, at) == 1e6 / (2 * parameters)
    assert beyond.tokens_per_second(moved, 10, parameters, 1e6, 1) == 10 / moved  # bringing takes longer
    assert beyond.tokens_per_second(0, 10, parameters, 1e6, 7) == 1e6 / (2 * parameters)


@pytest.mark.parametrize(("name", "ranks"), [("tiny", 100_000), ("small", 11), ("medium", 10)])
def test_the_number_of_ranks_in_the_message_works(name, ranks):
    with pytest.raises(ValueError, match=r"--ranks \d+") as error:
        beyond.plan_ranks(name, ranks)
    count = int(str(error.value).split()[-1])
    assert sorted(set(beyond.plan_ranks(name, count).values())) == list(range(count))


def test_the_reason_why_a_rank_failed_reaches_the_user(course):
    assert course.run(2).returncode == 0
    folder = course.artifacts / "tiny_transformer"
    state = {n: torch.zeros(t.shape) for n, t in build_empty("tiny").state_dict().items() if "layers.2.norm1" not in n}
    save_sharded_checkpoint(state, folder)
    command = [sys.executable, str(course.folder / "notebooks" / "beyond_one_machine.py"), "--config", "tiny"]
    environment = os.environ | {"PYTHONPATH": str(course.folder)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=course.folder, env=environment)
    assert result.returncode == 1 and "CheckpointError: the checkpoint lacks encoder.layers.2.norm1" in result.stderr


def test_a_rank_number_left_in_the_environment_does_no_harm():
    command = [sys.executable, str(SCRIPT), "--config", "tiny"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"RANK": "0"})
    assert result.returncode == 0 and facts(result.stdout)["logits_equal"] == "True", result.stderr
