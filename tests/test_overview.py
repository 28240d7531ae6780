"""The fifteen-minute story, as its script: run from another folder, on a small model."""

import os
import subprocess
import sys

from conftest import ROOT, facts

from notebooks import overview, real_llm
from step02_checkpoint.build_checkpoint import ensure_checkpoint
from step03_meta_build.meta_build import build_empty
from step04_to_empty_load.load_with_meta import load_strict, run
from step05_device_map.device_map import forecast


def test_the_script_as_a_user_runs_it_in_another_folder(tmp_path):
    ensure_checkpoint("small")
    command = [sys.executable, str(ROOT / "notebooks" / "overview.py"), "--config", "small"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    said = facts(result.stdout)
    assert said["logits_equal"] == "True" and said["peak_resident_bytes"].split()[0] == said["forecast_peak_bytes_0"]
    peaks = {
        line.split(":")[0]: float(line.split("(")[1].split()[0])
        for line in result.stdout.splitlines()
        if "_mb=" in line
    }
    assert list(peaks) == list(overview.WAYS)
    assert peaks["the usual way"] > 1.8 and peaks["blocks from disk"] < 0.5 * peaks["the usual way"]
    assert said["answer"] == "The capital of France is Paris." or said["answer"].startswith("small sorts")
    assert [*tmp_path.iterdir()] == []


def test_on_a_fresh_clone_it_builds_what_it_needs(course):
    command = [sys.executable, str(course.folder / "notebooks" / "overview.py"), "--config", "small"]
    environment = os.environ | {"PYTHONPATH": str(course.folder)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=course.folder, env=environment)
    assert result.returncode == 0, result.stderr
    said = facts(result.stdout)
    assert said["logits_equal"] == "True" and said["answer"].startswith("small sorts the two sequences")


def test_three_tiers_and_the_forecast():
    packer, happened, equal = overview.plan_and_run("small")
    assert equal and all(packer.used[device] for device in (0, "cpu", "disk"))
    assert happened.peak_resident_bytes == forecast(packer)["peak_bytes_0"] <= overview.budgets("small")[0]
    assert sum(packer.used.values()) == sum(parameter.nbytes for parameter in build_empty("small").parameters())


def test_without_the_real_model_small_answers(monkeypatch, tmp_path):
    monkeypatch.setattr(real_llm, "FOLDER", tmp_path / "absent")
    right = run(load_strict(build_empty("small"), ensure_checkpoint("small").shards)).argmax(dim=-1).tolist()
    assert overview.ask("Hello?", "160MiB").startswith(
        f"small sorts the two sequences into the classes {right}; `make llm`"
    )
