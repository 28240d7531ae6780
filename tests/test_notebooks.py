"""Notebook and script never drift, and a wrong output does not pass."""

import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from conftest import ROOT
from sync_notebooks import METADATA, compared, definitions, picture, refreshed, shown_names, with_stable_metadata

NOTEBOOKS = sorted([*ROOT.glob("step*/*.ipynb"), *ROOT.glob("notebooks/*.ipynb")])


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code" and cell.source]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param


def test_cells_that_show_a_script_are_the_script(notebook):
    for cell in code_cells(notebook):
        assert cell.source == refreshed(cell.source, notebook), "run `make notebooks`"


def test_code_of_the_script_is_not_retyped(notebook):
    available = definitions(notebook.with_suffix(".py"))
    for cell in code_cells(notebook):
        if shown_names(cell.source) is None:
            retyped = [name for name in available if f"def {name}(" in cell.source or f"class {name}(" in cell.source]
            assert retyped == [], "start the cell with the header line that shows them"


def test_every_public_definition_is_shown(notebook):
    shown = {name for cell in code_cells(notebook) for name in (shown_names(cell.source) or ("", []))[1]}
    source = notebook.with_suffix(".py").read_text()
    functions = {name for name in definitions(notebook.with_suffix(".py")) if f"def {name}(" in source}
    classes = {name for name in definitions(notebook.with_suffix(".py")) if f"class {name}" in source}
    assert (functions | classes) - {"main"} - shown == set()


def test_every_cell_was_executed_in_order_without_error(notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run `make notebooks`"
    for cell in cells:
        errors = [output.ename for output in cell.outputs if output.output_type == "error"]
        assert errors == [] or "raises-exception" in cell.metadata.get("tags", [])
        assert [output for output in cell.outputs if output.get("name") == "stderr"] == []


def test_no_path_of_a_machine_is_in_a_notebook(notebook):
    text = notebook.read_text(encoding="utf-8")
    assert [path for path in ("site-packages", "/tmp/", "/home/", "ipykernel_", str(ROOT)) if path in text] == []


def test_metadata_is_stable(notebook):
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    assert content.metadata == METADATA
    again = with_stable_metadata(nbformat.read(notebook, as_version=4))
    assert compared(content) == compared(again) and [c.id for c in content.cells] == [c.id for c in again.cells]


def test_a_notebook_starts_with_what_you_learn_and_how_long_it_takes(notebook):
    first = nbformat.read(notebook, as_version=4).cells[0].source
    assert first.startswith("# ") and "You will be able to" in first and "Minutes" in first and "Before this" in first


def test_each_figure_is_told_in_words(notebook):
    told = True
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "markdown":
            told = told or "**Figure**" in cell.source
        elif any("image/png" in output.get("data", {}) for output in cell.outputs):
            assert told, f"nobody says what is to be seen before the figure of: {cell.source}"
            told = False
    assert told


def test_text_in_figures_can_be_read():
    sizes = re.findall(r"font\.?size[\"']?[=:] ?(\d+)", (ROOT / "notebooks" / "figures.py").read_text())
    assert len(sizes) > 5 and min(map(int, sizes)) >= 9


def test_the_readme_shows_the_picture_of_the_overview():
    overview = ROOT / "notebooks" / "overview.ipynb"
    assert "(notebooks/overview.png)" in (ROOT / "README.md").read_text()
    assert picture(nbformat.read(overview, as_version=4)) == overview.with_suffix(".png").read_bytes()


def run_nbval(path, **environment):
    sanitize = ROOT / "tests" / "nbval_sanitize.cfg"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env"]
    return subprocess.run(
        [*command, "--nbval-sanitize-with", sanitize, path.name], cwd=path.parent, capture_output=True, text=True,
        env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "wrong output planted"])
def test_nbval_sees_a_wrong_output(tmp_path, planted):
    copy = tmp_path / "model_def.ipynb"
    shutil.copy(ROOT / "step01_model_def" / "model_def.ipynb", copy)
    if planted:
        text = copy.read_text()
        assert text.count("parameters=159298\\n") == 1
        copy.write_text(text.replace("parameters=159298\\n", "parameters=156866\\n"))
    result = run_nbval(copy)
    assert result.returncode == (1 if planted else 0), result.stdout
    assert ("156866" in result.stdout) == planted


def test_masks_hide_measurements_and_nothing_else():
    def one_cell(text):
        cell = nbformat.v4.new_code_cell("run()", outputs=[nbformat.v4.new_output("stream", text=text)])
        return compared(nbformat.v4.new_notebook(cells=[cell]))

    assert one_cell("rss_start_mb=12.5\nbuild_seconds=0.1\n") == one_cell("rss_start_mb=99.1\nbuild_seconds=3.7\n")
    assert one_cell("missing_keys=[]\n") != one_cell("missing_keys=['a']\n")
    assert one_cell("small_bytes=1\n") != one_cell("small_bytes=2\n")


@pytest.mark.parametrize("name", ["step04_to_empty_load/load_with_meta", "step06_hooks_offload/hooks_offload"])
def test_a_notebook_runs_alone_before_anything_is_built(course, name):
    path = course.folder / f"{name}.ipynb"
    shutil.copy(ROOT / f"{name}.ipynb", path)
    result = run_nbval(path, PYTHONPATH=str(course.folder))
    assert result.returncode == 0, result.stdout
    assert course.artifacts.exists()
