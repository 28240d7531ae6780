"""What instructors and newcomers use: the doctor, the copies for students, and what Make offers."""

import importlib
import os
import re
import subprocess
import sys
import venv

import doctor
import nbformat
import pytest
import student
from conftest import ROOT

from step02_checkpoint.build_checkpoint import checkpoint_paths, ensure_checkpoint


def run_doctor(python=sys.executable, folder=ROOT, **environment):
    command = [str(python), str(folder / "tests" / "doctor.py")]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_the_doctor_is_content_with_this_environment():
    result = run_doctor()
    lines = dict(re.fullmatch(r"\[(?:OK|FAIL)\] (\w+): (.+)", line).groups() for line in result.stdout.splitlines())
    assert list(lines) == list(doctor.CHECKS) and result.stderr == ""
    wrong = [line for line in result.stdout.splitlines() if line.startswith("[FAIL]")]
    assert [line for line in wrong if not line.startswith(("[FAIL] memory", "[FAIL] disk"))] == []
    assert result.returncode == (1 if wrong else 0)


def test_before_the_installation_each_line_says_what_to_do(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / ("Scripts" if os.name == "nt" else "bin") / "python"
    result = run_doctor(python, PYTHONPATH="")
    assert result.returncode == 1 and "Traceback" not in result.stdout + result.stderr
    failed = [line for line in result.stdout.splitlines() if line.startswith("[FAIL]")]
    names = {line.split()[1] for line in failed}
    assert {"packages:", "torch:", "course:", "kernel:"} <= names
    for line in failed:
        assert "pip install -r requirements.txt" in line or "as long as" in line or "of 2.5 wanted" in line, line


def test_an_old_python_and_another_torch_are_told(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert doctor.check_python()[0] is False and "3.11 or newer" in doctor.check_python()[1]
    monkeypatch.setattr(doctor, "requirements", lambda: {"torch": "1.0.0"})
    assert doctor.check_torch()[0] is False and "pip install torch==1.0.0" in doctor.check_torch()[1]


def test_a_driver_that_is_too_old_is_told(monkeypatch):
    warning = (
        "UserWarning: The NVIDIA driver on your system is too old (found version 11040).\n  return torch._C._cuda()"
    )
    answer = subprocess.CompletedProcess([], 0, stdout="\n", stderr=warning)
    monkeypatch.setattr(doctor, "ask_torch", lambda question: answer)
    good, text = doctor.check_accelerator()
    assert not good and "driver on your system is too old" in text and "the CPU serves too" in text


def test_little_memory_little_disk_and_a_damaged_file_are_told(monkeypatch, course):
    monkeypatch.setattr(doctor, "RAM_GB", 10**6)
    monkeypatch.setattr(doctor, "DISK_GB", 10**9)
    assert "close programs" in doctor.check_memory()[1] and "free some space" in doctor.check_disk()[1]
    assert not doctor.check_memory()[0] and not doctor.check_disk()[0]
    ensure_checkpoint("tiny")
    assert doctor.check_artifacts()[0]
    monkeypatch.setattr("step02_checkpoint.build_checkpoint.checkpoint_paths", lambda name: damaged(name, course))
    good, text = doctor.check_artifacts()
    assert not good and "python step02_checkpoint/build_checkpoint.py" in text


def damaged(name, course):
    paths = checkpoint_paths(name)
    file = course.folder / "half.pt"
    file.write_bytes(paths.weights.read_bytes()[:1000] if paths.weights.exists() else b"")
    return paths._replace(weights=file)


def test_a_kernel_of_another_python_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.Path, "home", lambda: tmp_path)
    assert doctor.check_kernel()[0]
    homes = {"Darwin": "Library/Jupyter", "Windows": "AppData/Roaming/jupyter"}
    folder = tmp_path / homes.get(doctor.platform.system(), ".local/share/jupyter") / "kernels" / "python3"
    folder.mkdir(parents=True)
    other = str(tmp_path.absolute() / "bin" / "python")
    (folder / "kernel.json").write_text(f'{{"argv": ["{other}", "-m", "ipykernel_launcher"]}}'.replace("\\", "\\\\"))
    good, text = doctor.check_kernel()
    assert not good and "jupyter kernelspec remove python3" in text


def test_copies_for_students_have_no_outputs_and_no_solutions():
    subprocess.run([sys.executable, str(ROOT / "tests" / "student.py")], check=True, capture_output=True)
    for path in student.NOTEBOOKS:
        original = nbformat.read(path, as_version=4)
        copy = nbformat.read(ROOT / "artifacts" / "student" / path.relative_to(ROOT), as_version=4)
        tags = [tag for cell in copy.cells for tag in cell.metadata.get("tags", [])]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in copy.cells)
        assert not any(tag.endswith("-solution") for tag in tags)
        stubs = [t for cell in original.cells for t in cell.metadata.get("tags", []) if t.endswith("-stub")]
        assert [tag for tag in tags if tag.endswith("-stub")] == stubs
        assert len(copy.cells) == len(original.cells) - len(stubs)


def test_the_readme_lists_what_make_offers():
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "README.md").read_text()
    offered = re.findall(r"^(\w+):.*##", makefile, re.MULTILINE)
    assert len(offered) >= 10
    assert [target for target in offered if f"`make {target}`" not in readme] == []


@pytest.mark.parametrize("page", ["README.md", "notebooks/TEACHING.md", "CONTRIBUTING.md"])
def test_no_link_of_a_page_is_dead(page):
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [link for link in links if "://" not in link and not ((ROOT / page).parent / link).exists()] == []


def test_the_map_from_our_names_to_accelerates_is_true():
    accelerate = pytest.importorskip("accelerate", reason="requirements-dev.txt is not installed")
    from accelerate import big_modeling, hooks, utils

    places = (accelerate, big_modeling, hooks, utils, utils.modeling, utils.offload)
    rows = re.findall(r"^\| ([3-7]) \| (`.*`) \| (.*?) \|.*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 12
    for step, ours, theirs in rows:
        module = next(path for path in ROOT.glob(f"step0{step}_*/*.py"))
        step_module = importlib.import_module(f"{module.parent.name}.{module.stem}")
        for name in re.findall(r"`(\w+)`", ours):
            assert hasattr(step_module, name), f"step {step} has no {name}"
            assert theirs != "the same" or any(hasattr(place, name) for place in places), f"Accelerate has no {name}"
        for name in re.findall(r"`(\w+)`", theirs):
            assert any(hasattr(place, name) for place in places)


def test_the_readme_says_the_minutes_of_the_notebooks():
    readme = (ROOT / "README.md").read_text()
    for path in student.NOTEBOOKS:
        minutes = re.search(r"\*\*Minutes\*\* (\d+)", nbformat.read(path, as_version=4).cells[0].source)[1]
        link = path.relative_to(ROOT).as_posix()
        assert re.search(rf"\({re.escape(link)}\) \| [^|]+ \| {minutes} \|", readme), f"{link} takes {minutes} minutes"
