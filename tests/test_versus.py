"""The race's own arithmetic; the race itself runs on `tiny` in its notebook. No test looks at times."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from notebooks import versus_accelerate as versus
from step02_checkpoint.build_checkpoint import ensure_checkpoint


def results(**seconds):
    rivals = dict.fromkeys(
        ["raw_read", "resident", "ours_read_ahead", "accelerate_dat", "accelerate_safetensors"], 1.0
    )
    found = {}
    for rival, second in (rivals | seconds).items():
        run = {"forward_seconds": second, "load_seconds": second, "output": "a"}
        found[rival] = {"cold": run, "warm": run}
    return found


def test_goals_are_ratios_of_one_run():
    reached = {name: value for name, (value, _) in versus.goals(results(ours_read_ahead=0.5, raw_read=2.0)).items()}
    assert reached["cold_forward_over_floor"] == 0.25  # the longer of reading and computing
    assert reached["warm_forward_over_resident"] == reached["cold_load_over_accelerate_dat"] == 0.5
    assert versus.outputs_equal(results())
    other = results()
    other["ours_read_ahead"]["warm"] = {"output": "b"}
    assert not versus.outputs_equal(other)


def test_every_rival_runs_the_same_map():
    model = versus.build("tiny")
    device_map = versus.blocks_on("disk", model)
    assert [key for key, place in device_map.items() if place == "disk"] == [f"encoder.layers.{i}" for i in range(3)]
    assert set(device_map.values()) == {"cpu", "disk"} and versus.block_classes(model) == ["TransformerEncoderLayer"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux tells of a process")
def test_memory_and_bytes_from_disk_are_measured(tmp_path):
    with versus.MemoryPeaks() as peaks:
        held = bytearray(os.urandom(64 * 2**20))
    assert peaks.peaks["RssAnon"] > 0.9 * len(held)
    (tmp_path / "f").write_bytes(held)
    versus.forget(tmp_path)
    before = versus.bytes_from_disk()
    (tmp_path / "f").read_bytes()
    assert versus.bytes_from_disk() >= before


def test_one_run_reports_its_measures():
    ensure_checkpoint("tiny")
    outputs = set()
    for rival in ("ours_read_ahead", "raw_read"):
        command = [sys.executable, "-m", "notebooks.versus_accelerate", "--one", rival, "warm", "--config", "tiny"]
        child = subprocess.run([*command, "--tokens", "8"], capture_output=True, text=True, cwd=ROOT)
        run = json.loads(child.stdout.splitlines()[-1])
        outputs.add(run.get("output"))
        assert run["forward_seconds"] > 0 and (rival == "raw_read" or run["bytes_from_disk"] >= 0)
    assert len(outputs) == 2


ON_A_PRETEND_GPU = """
import contextlib, io
from notebooks import pretend_gpu, versus_accelerate as versus
pretend_gpu.install()
results = {}
for rival in versus.ON_ACCELERATOR:
    if "accelerate" not in rival:
        with contextlib.redirect_stderr(io.StringIO()):
            results[rival] = {"warm": versus.run_once(rival, "tiny", 8, "warm")}
results["on the CPU"] = {"warm": versus.run_once("resident", "tiny", 8, "warm")}
assert versus.outputs_equal(results), results
results["raw_copy"] = {"warm": versus.copy_once("tiny")}
for rival in ("gpu_accelerate", "gpu_accelerate_disk"):
    results[rival] = results["raw_copy"]
print(len(versus.goals_on_accelerator(results)))
"""


def test_every_way_on_an_accelerator_computes_what_the_cpu_does():
    """Accelerate's own are left out: it does not know the pretend GPU."""
    ensure_checkpoint("tiny")
    child = subprocess.run([sys.executable, "-c", ON_A_PRETEND_GPU], capture_output=True, text=True, cwd=ROOT)
    assert child.returncode == 0 and child.stdout == "4\n", child.stderr


def test_the_race_on_an_accelerator_says_that_there_is_none(monkeypatch):
    monkeypatch.setattr(versus, "accelerators", list)
    with pytest.raises(ValueError, match="no accelerator; without `--on accelerator`"):
        versus.race_on_accelerator("tiny", 8, 1)
