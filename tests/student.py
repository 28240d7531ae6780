"""Write the notebooks as a class wants them: no outputs, exercises unsolved, in `artifacts/student/`.

`make student` runs it. What is written is new each time: give learners the folder, not your own copy.
"""

import re
import sys
from pathlib import Path

import nbformat

from step02_checkpoint.build_checkpoint import ARTIFACTS, relative, write_whole

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted([*ROOT.glob("step*/*.ipynb"), *ROOT.glob("notebooks/*.ipynb")])


def for_students(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Take the outputs and the solutions of exercises out of a notebook; returns it."""
    solution = re.compile(r"exercise-\d+-solution")
    notebook.cells = [c for c in notebook.cells if not any(map(solution.fullmatch, c.metadata.get("tags", [])))]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def main() -> None:
    folder = ARTIFACTS / "student"
    with write_whole(folder) as partial:
        for path in NOTEBOOKS:
            target = partial / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(for_students(nbformat.read(path, as_version=4)), target)
    print(f"student={relative(folder)}")
    print(f"notebooks={len(NOTEBOOKS)}")


if __name__ == "__main__":
    sys.exit(main())
