"""Every exercise can be solved: the stub says what to do, the solution passes, a wrong answer learns why."""

import re

import matplotlib
import nbformat
import pytest
from test_notebooks import NOTEBOOKS

matplotlib.use("Agg")

# One plausible wrong answer for each exercise: source code, and what the check must say.
WRONG = {
    ("device_map", 1): (
        "def largest_to_come(sizes):\n    return [max(sizes[i:]) for i in range(len(sizes))]",
        "a unit itself does not count",
    ),
    ("device_map", 2): (
        "def smallest_useful_budget(model):\n"
        "    sizes = compute_module_sizes(model)\n"
        "    return get_max_layer_size(list(model.named_children()), sizes, [])[0]",
        "did you count the reserve",
    ),
    ("device_map", 3): (
        "def spread(model, device_map):\n"
        "    return override_device_map(model, device_map, {f'encoder.layers.{i}': 'cpu' for i in (1, 3)})",
        "before it were 4",
    ),
}


def exercises():
    for path in NOTEBOOKS:
        tags = [cell.metadata.get("tags", []) for cell in nbformat.read(path, as_version=4).cells]
        numbers = {
            int(found.group(1)) for tag in sum(tags, []) if (found := re.fullmatch(r"exercise-(\d+)-stub", tag))
        }
        yield from ((path, number) for number in sorted(numbers))


@pytest.fixture(scope="module")
def lesson():
    """Run a notebook's ordinary cells once; returns its names and its exercises' cells."""
    lessons = {}

    def run(path):
        if path not in lessons:
            names, cells = {"__name__": "__main__"}, {}
            for cell in nbformat.read(path, as_version=4).cells:
                tags = [tag for tag in cell.metadata.get("tags", []) if tag.startswith("exercise-")]
                if tags:
                    cells[tags[0]] = cell
                elif cell.cell_type == "code":
                    exec(cell.source, names)
            lessons[path] = names, cells
        return lessons[path]

    return run


@pytest.mark.parametrize(("path", "number"), list(exercises()), ids=lambda value: getattr(value, "stem", value))
def test_an_exercise(lesson, path, number, capsys):
    names, cells = lesson(path)
    stub, check, solution = (cells[f"exercise-{number}-{part}"] for part in ("stub", "check", "solution"))
    assert "raises-exception" in check.metadata.tags and solution.metadata.jupyter.source_hidden
    exec(stub.source, names)
    with pytest.raises(NotImplementedError, match=r"\w+ \w+"):
        exec(check.source, names)
    exec(solution.source, names)
    assert f"exercise {number} passed" in capsys.readouterr().out
    answer, explanation = WRONG[path.stem, number]
    exec(answer, names)
    with pytest.raises(AssertionError, match=explanation):
        exec(check.source, names)
