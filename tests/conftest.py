"""What several tests share: a private copy of the course, run as a learner runs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = sorted(ROOT.glob("step*/"))
SCRIPTS = sorted(ROOT.glob("step*/*.py"))


class Course:
    """A copy of the course in a folder of its own, with artifacts of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.artifacts = folder / "artifacts"
        for source in [*STEPS, ROOT / "notebooks"]:
            shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))

    def script(self, step: int) -> Path:
        return next(self.folder.glob(f"step{step:02d}_*/*.py"))

    def run(self, step: int, *args: str, prefix=(), cwd=None, env=None, **options) -> subprocess.CompletedProcess:
        command = [*prefix, sys.executable, str(self.script(step)), *args]
        environment = os.environ | {"PYTHONPATH": str(self.folder)} | (env or {})
        return subprocess.run(
            command, cwd=cwd or self.folder, env=environment, capture_output=True, text=True, timeout=300, **options
        )


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path / "course")


def facts(output: str) -> dict[str, str]:
    """Read a script's output: one `key=value` a line."""
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
