"""The steps as a learner runs them: in order and out of order, from anywhere, on a disk that is full or locked."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv

import pytest
import torch
from conftest import ROOT, facts

from step02_checkpoint.build_checkpoint import ensure_checkpoint

STEPS = (1, 2, 3, 4, 5, 6, 7)


def test_in_order_from_the_root_without_a_home_folder(course):
    outputs = {step: course.run(step, env={"HOME": "/nonexistent/home"}) for step in STEPS}
    for step, result in outputs.items():
        assert result.returncode == 0 and result.stderr == "", (step, result.stderr)
    assert facts(outputs[1].stdout)["parameters"] == "159298"
    two = facts(outputs[2].stdout)
    assert two["config"] == "artifacts/model_config.json" and two["checkpoint"] == "artifacts/tiny_transformer.pt"
    assert two["parameters"] == "159298" and two["first_parameter_device"] == "cpu" and two["shards"] == "4"
    three = facts(outputs[3].stdout)
    assert three["same_structure_as_the_real_model"] == "True" and three["random_numbers_drawn"] == "False"
    assert float(three["giant_meta_build_peak_rss_mb"]) < 100
    check_step_4(outputs[4].stdout)
    for command, shown in readme_outputs().items():
        step = int(command.removeprefix("python step")[:2])
        assert set(shown) <= set(outputs[step].stdout.splitlines()), f"the README shows something else for {command}"
    check_first_screen(outputs)


def check_first_screen(outputs):
    """The README's first screen shows lines that the steps print, each under its script."""
    block = re.search(r"\$ make\n((?:[^$`].*\n)+)```", (ROOT / "README.md").read_text())[1]
    printed = []
    for line in block.splitlines():
        if line.startswith("== step"):
            printed = outputs[int(line[7:9])].stdout.splitlines()
        else:
            assert line in printed, f"the README shows another line than is printed: {line}"


def readme_outputs():
    """Read from the README which lines it shows for which step's command."""
    blocks = re.findall(r"```console\n\$ (python step.*)\n((?:[^$`].*\n)+)```", (ROOT / "README.md").read_text())
    assert len(blocks) >= 2
    return {command: output.splitlines() for command, output in blocks}


def check_step_4(output):
    order = [
        "rss_start_mb", "after_meta_build_rss_mb", "parameters=159298", "meta_parameter_tensors=40",
        "first_parameter_device_before_to_empty=meta", "first_parameter_device_after_to_empty=cpu",
        "missing_keys=[]", "unexpected_keys=[]", "after_load_rss_mb", "logits=", "predicted_classes=",
        "missing []", "unexpected []", "output_device cpu", "output_shape [1, 2]", "has_nan False",
        "logits_equal True",
    ]  # fmt: skip
    lines = [line for line in output.splitlines() if not line.startswith("note=")]
    assert [line.startswith(start) for line, start in zip(lines, order, strict=False)] == [True] * len(order)
    four = facts(output)
    assert four["to_empty_missing_keys"] == "[]" and four["to_empty_keeps_table"] == "False"
    assert four["materialize_then_load_strict_is_right"] == four["load_strict_is_right"] == "True"
    assert four["assign_keeps_tie"] == four["to_empty_keeps_tie"] == "False"
    assert int(four["no_assign_warnings"]) == 2


QUICK = {4: ["--measure", "tiny"]}  # the peaks of `small` are measured once, in order from the root


@pytest.mark.parametrize("step", STEPS)
def test_from_its_own_folder_out_of_order_and_twice(course, step):
    first, second = (course.run(step, *QUICK.get(step, []), cwd=course.script(step).parent) for _ in range(2))
    for result in (first, second):
        assert result.returncode == 0 and result.stderr == "", result.stderr
    if step == 4:
        assert "note=artifacts/model_config.json is missing: building it" in first.stdout
        assert "note=" not in second.stdout
        check_step_4(first.stdout), check_step_4(second.stdout)
    assert [path.name for path in course.script(step).parent.iterdir() if path.is_file()] == [course.script(step).name]
    assert list(course.artifacts.rglob(".*")) == []


def changes_in_the_readme():
    """Read from the README's table of steps what a learner may change: pairs of a step and its options."""
    rows = re.findall(r"^\| (\d) \[`step.*\| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return [(int(step), options) for step, cell in rows for options in re.findall(r"`(--[^`]+)`", cell)]


@pytest.mark.skipif(os.name == "nt", reason="links to checkpoints that are built")
@pytest.mark.parametrize(("step", "options"), changes_in_the_readme())
def test_what_the_readme_says_can_be_changed(course, step, options):
    assert len(changes_in_the_readme()) >= 7
    for name in ("small", "medium"):  # built once, at the course itself; read from here
        if name in options and step > 2 and ensure_checkpoint(name):
            course.artifacts.mkdir(exist_ok=True)
            (course.artifacts / name).symlink_to(ROOT / "artifacts" / name)
    result = course.run(step, *shlex.split(options))
    assert result.returncode == 0 and result.stderr == "", result.stderr


LESSONS = sorted([*ROOT.glob("step*/*.py"), *ROOT.glob("notebooks/*.ipynb")])


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_without_the_installation_one_line_says_what_to_do(bare_python, lesson):
    command = [str(bare_python), str(lesson.with_suffix(".py"))]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
    ends_in_one_line(result, "No module named", "run `make`", "pip install -r requirements.txt")


def ends_in_one_line(result, *parts):
    assert result.returncode == 1
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.stderr
    for part in parts:
        assert part in result.stderr


OLD_DRIVER = """
import torch, warnings

def count():
    warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).")
    return 0

torch._C._accelerator_getAccelerator, torch.cuda._is_compiled = (lambda: torch.device("cuda")), (lambda: True)
torch._C._cuda_getDeviceCount, torch._C._cuda_getCurrentRawStream = count, None
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="plays a build for CUDA on one for the CPU")
def test_with_a_driver_that_is_too_old_the_cpu_serves(course, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OLD_DRIVER)
    for step in (1, 5, 6, 7):
        env = {"PYTHONPATH": os.pathsep.join([str(course.folder), str(tmp_path)])}
        result = course.run(step, *QUICK.get(step, []), env=env)
        assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
        assert step < 6 or ("driver on your system is too old" in result.stderr and result.stderr.count("\n") <= 4)
        assert step < 6 or facts(result.stdout)["logits_equal"] == "True"


def test_a_damaged_config_ends_in_one_line(course):
    course.run(2)
    (course.artifacts / "model_config.json").write_text("{")
    ends_in_one_line(course.run(4), "model_config.json", "python step02_checkpoint/build_checkpoint.py")
    assert course.run(2).returncode == 0
    assert course.run(4, *QUICK[4]).returncode == 0


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
@pytest.mark.parametrize("step", [2, 4])
def test_too_little_memory_ends_in_one_line(course, step):
    import resource

    free = course.run(1, env={"OMP_NUM_THREADS": "1"})
    assert free.returncode == 0
    code = "import psutil, torch; print(psutil.Process().memory_info().vms)"
    imports = int(subprocess.check_output([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}))
    limit = imports + 300 * 2**20  # 800 MB of weights do not fit, what else the step needs does
    little = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))}
    options = {2: ["--config", "medium"], 4: ["--config", "medium", *QUICK[4]]}[step]
    result = course.run(step, *options, env={"OMP_NUM_THREADS": "1"}, **little)
    ends_in_one_line(result, "MemoryError: not enough memory", "--config", "make doctor")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files as Linux does")
def test_a_full_disk_leaves_the_old_checkpoint(course):
    import resource

    course.run(2)
    before = snapshot(course.artifacts)
    full = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))}
    ends_in_one_line(course.run(2, **full), "cannot write artifacts/", "Free some space")
    assert snapshot(course.artifacts) == before
    shutil.rmtree(course.artifacts)
    ends_in_one_line(course.run(4, **full), "cannot write artifacts/")
    assert snapshot(course.artifacts) == {}


def without_root_powers():
    """Give the command prefix under which permission bits count for root too, or skip."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may write anywhere, and there is no setpriv to take that away")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"]


@pytest.mark.skipif(os.name != "posix", reason="permission bits as POSIX has them")
def test_a_read_only_artifact_folder(course):
    prefix = without_root_powers()
    course.artifacts.mkdir()
    course.artifacts.chmod(0o555)
    try:
        ends_in_one_line(course.run(2, prefix=prefix), "cannot write artifacts/", "make the folder writable")
        ends_in_one_line(course.run(4, prefix=prefix), "cannot write artifacts/")
        assert course.run(3, prefix=prefix).returncode == 0
    finally:
        course.artifacts.chmod(0o755)
    course.run(2)
    course.artifacts.chmod(0o555)
    try:
        assert course.run(4, *QUICK[4], prefix=prefix).returncode == 0, "reading needs no writing"
        assert facts(course.run(7, prefix=prefix).stdout)["logits_equal"] == "True", "nor does offloading to disk"
        pickle = str(course.artifacts / "tiny_transformer.pt")
        ends_in_one_line(course.run(7, "--checkpoint", pickle, prefix=prefix), "artifacts/offload", "writable")
    finally:
        course.artifacts.chmod(0o755)


def test_options(course):
    assert course.run(2, "--max-shard-size", "100KB").stdout.count("shards=9") == 1
    ends_in_one_line(course.run(2, "--max-shard-size", "many"), "'many' is not a size")
    assert "invalid choice: 'giant'" in course.run(2, "--config", "giant").stderr
    result = course.run(3, "--config", "medium")
    assert facts(result.stdout)["medium_parameters"] == "202696706"


def test_another_configuration_goes_its_own_way(course):
    course.run(2)
    before = snapshot(course.artifacts)
    result = course.run(2, "--config", "small")
    assert facts(result.stdout)["checkpoint"] == "artifacts/small/small_transformer.pt"
    assert {path: content for path, content in snapshot(course.artifacts).items() if path in before} == before
    assert json.loads((course.artifacts / "small" / "model_config.json").read_text())["hidden_size"] == 512
    assert "logits_equal True" in course.run(4, "--config", "small", *QUICK[4]).stdout
