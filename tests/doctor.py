"""Say what on this machine keeps the course from running, and how to mend it: one line a check.

`make doctor` runs it, before or after the installation: it needs nothing but Python itself. Paste what it prints
into a bug report.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INSTALL = "run `make`, or in the activated .venv: pip install -r requirements.txt"
RAM_GB, DISK_GB = 3, 2.5  # the notebook of step 7 wants most: two copies of 0.8 GB in memory, 1.6 GB of files


def requirements() -> dict[str, str]:
    """Read which packages the course needs: name -> the pinned version, or nothing."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return dict(re.fullmatch(r"([\w-]+)(?:==(.*))?", line).groups("") for line in lines if line[:1] not in ("#", "-"))


def check_python() -> tuple[bool, str]:
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < (3, 11):  # noqa: UP036  the doctor runs before anything is installed
        return False, f"{version}; the course needs 3.11 or newer: make PYTHON=python3.11, after rm -rf .venv"
    return True, version


def check_packages() -> tuple[bool, str]:
    missing = []
    for name in requirements():
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return not missing, f"missing: {', '.join(missing)}; {INSTALL}" if missing else f"{len(requirements())} installed"


def ask_torch(question: str) -> subprocess.CompletedProcess:
    """Run a line that has torch in a process of its own: a broken one must not end the doctor."""
    return subprocess.run([sys.executable, "-c", f"import torch; {question}"], capture_output=True, text=True)


def check_torch() -> tuple[bool, str]:
    answer, wanted = ask_torch("print(torch.__version__)"), requirements()["torch"]
    if answer.returncode:
        return False, f"cannot be imported ({(answer.stderr.strip().splitlines() or ['killed'])[-1]}); {INSTALL}"
    found = answer.stdout.strip()
    if found.split("+")[0] != wanted:
        return False, f"{found}; the course's outputs are those of {wanted}: pip install torch=={wanted}"
    return True, found


def check_accelerator() -> tuple[bool, str]:
    answer = ask_torch("print(torch.accelerator.current_accelerator() if torch.accelerator.is_available() else '')")
    if answer.returncode:
        return False, "unknown, as long as torch cannot be imported"
    if "driver" in answer.stderr:
        said = " ".join(line.strip() for line in answer.stderr.splitlines() if "driver" in line)
        return (
            False,
            f"{said[:200]}; update the driver, or install the CPU build of torch (README); the CPU serves too",
        )
    return True, answer.stdout.strip() or "none; the CPU plays device 0"


def check_course() -> tuple[bool, str]:
    """The repository itself is installed, and it is this one."""
    question = "import importlib.util as i; s = i.find_spec('step01_model_def.model_def'); print(s.origin)"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, cwd=ROOT.parent)
    if answer.returncode:
        return False, f"not installed for this Python; {INSTALL}"
    place = Path(answer.stdout.strip()).resolve()
    if not place.is_relative_to(ROOT):
        return False, f"another copy is installed, {place.parents[1]}; here: pip install -e {ROOT}"
    return True, "installed, editable"


def check_kernel() -> tuple[bool, str]:
    """Notebooks run in this Python: its kernel is there, and none of the user's own hides it."""
    if importlib.util.find_spec("ipykernel") is None:
        return False, f"ipykernel is missing; {INSTALL}"
    homes = {"Darwin": "Library/Jupyter", "Windows": "AppData/Roaming/jupyter"}
    user = Path.home() / homes.get(platform.system(), ".local/share/jupyter") / "kernels" / "python3" / "kernel.json"
    if user.is_file():
        program = json.loads(user.read_text(encoding="utf-8"))["argv"][0]
        if Path(program).is_absolute() and Path(program) != Path(sys.executable):
            return False, f"your own kernel `python3` runs {program}: jupyter kernelspec remove python3"
    return True, "python3, of this Python"


def check_memory() -> tuple[bool, str]:
    if importlib.util.find_spec("psutil") is None:
        return False, f"unknown without psutil; {INSTALL}"
    import psutil

    free = psutil.virtual_memory().available / 1e9
    mend = "close programs; `tiny` and `small` run all the same, and `--config tiny` needs least"
    return free >= RAM_GB, f"{free:.1f} GB free" + ("" if free >= RAM_GB else f" of {RAM_GB} wanted; {mend}")


def check_disk() -> tuple[bool, str]:
    free = shutil.disk_usage(ROOT).free / 1e9
    if not os.access(ROOT, os.W_OK):
        return False, "the course's folder cannot be written; copy it to one of your own"
    mend = "free some space; `make clean` removes artifacts/"
    return free >= DISK_GB, f"{free:.1f} GB free" + ("" if free >= DISK_GB else f" of {DISK_GB} wanted; {mend}")


def check_artifacts() -> tuple[bool, str]:
    """What the steps have written so far is whole; what is missing is built when it is needed."""
    try:
        from step02_checkpoint.build_checkpoint import CONFIGS, check_checkpoint, checkpoint_paths, rebuild_command
    except ImportError:
        return False, f"unknown, as long as the course is not installed; {INSTALL}"
    whole, damaged = [], []
    for name in [name for name in CONFIGS if name != "giant"]:
        if all(path.exists() for path in checkpoint_paths(name)):
            try:
                check_checkpoint(name)
                whole.append(name)
            except (ValueError, OSError) as error:
                damaged.append(f"{error}: {rebuild_command(name)}")
    return not damaged, "; ".join(damaged) or f"whole: {', '.join(whole) or 'none yet, the steps build them'}"


CHECKS = {
    "python": check_python,
    "packages": check_packages,
    "torch": check_torch,
    "accelerator": check_accelerator,
    "course": check_course,
    "kernel": check_kernel,
    "memory": check_memory,
    "disk": check_disk,
    "artifacts": check_artifacts,
}


def main() -> int:
    results = []
    for name, check in CHECKS.items():
        good, text = check()
        results.append(good)
        print(f"[{'OK' if good else 'FAIL'}] {name}: {text}", flush=True)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
