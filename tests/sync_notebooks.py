"""Keep notebooks and scripts one: refresh the cells that show a script's code, execute, write back.

`python tests/sync_notebooks.py step*/*.ipynb` is what `make notebooks` runs. A cell whose first line is like
`# meta_build.py: init_empty_weights, rss_mb` shows those definitions of that script and nothing else.

A notebook is written only when something in it that is compared has changed: code, prose, or an output that
is the same on every run. So a second `make notebooks` leaves no difference, though times and memory differ.
"""

import ast
import base64
import json
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
HEADER = re.compile(r"# (\w+\.py): (\w+(?:, \w+)*)")
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def definitions(script: Path) -> dict[str, str]:
    """Map each name that a script defines at its top level to the source of its definition."""
    source = script.read_text(encoding="utf-8")
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def shown_names(cell_source: str) -> tuple[str, list[str]] | None:
    """Read the header of a cell that shows a script's code: the script's file name and the shown names."""
    match = HEADER.fullmatch(cell_source.split("\n")[0].strip())
    return (match.group(1), match.group(2).split(", ")) if match else None


def refreshed(cell_source: str, notebook: Path) -> str:
    """Write a cell anew from the script that it shows; any other cell comes back as it is."""
    shown = shown_names(cell_source)
    if shown is None:
        return cell_source
    script, names = notebook.parent / shown[0], shown[1]
    available = definitions(script)
    absent = [name for name in names if name not in available]
    if absent:
        raise SystemExit(f"{notebook}: {script.name} does not define {', '.join(absent)}")
    header = f"# {script.name}: {', '.join(names)}\n"
    return header + "\n\n\n".join(available[name] for name in names)


def sanitize_patterns() -> list[tuple[str, str]]:
    """Read what nbval masks before it compares."""
    text = (ROOT / "tests" / "nbval_sanitize.cfg").read_text()
    return re.findall(r"^regex: (.*)\nreplace: (.*)$", text, re.MULTILINE)


def compared(notebook: nbformat.NotebookNode) -> list:
    """Take from a notebook all that must be the same on every run."""
    cells = []
    for cell in notebook.cells:
        ignored = "nbval-ignore-output" in cell.metadata.get("tags", [])
        outputs = "" if ignored else json.dumps(cell.get("outputs"), sort_keys=True)
        for pattern, mask in sanitize_patterns():
            outputs = re.sub(pattern, mask, outputs)
        cells.append((cell.cell_type, cell.source, cell.metadata, cell.get("execution_count"), outputs))
    return [cells, notebook.metadata]


def with_stable_metadata(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Keep of the metadata what does not change from run to run: the kernel, the cells' tags."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number}"
        kept = {key: cell.metadata[key] for key in ("tags", "jupyter") if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
        merge_streams(cell.get("outputs", []))
        for output in cell.get("outputs", []):
            if output.output_type == "error":  # where the libraries lie on one machine is nobody's business
                output.traceback = [f"{output.ename}: {output.evalue}"]
    return notebook


def merge_streams(outputs: list) -> None:
    """Join neighbouring pieces of one stream: where a kernel cuts its output is a matter of timing."""
    for index in range(len(outputs) - 1, 0, -1):
        before, here = outputs[index - 1], outputs[index]
        if here.output_type == before.output_type == "stream" and here.name == before.name:
            before.text += here.text
            del outputs[index]


def sync(path: Path) -> bool:
    """Refresh and execute one notebook; returns whether the file was written."""
    old = nbformat.read(path, as_version=4)
    new = nbformat.read(path, as_version=4)
    for cell in new.cells:
        if cell.cell_type == "code":
            cell.source = refreshed(cell.source, path)
    client = NotebookClient(new, kernel_name="python3", timeout=600, resources={"metadata": {"path": path.parent}})
    client.execute()
    new = with_stable_metadata(new)
    if compared(new) == compared(old):
        return False
    nbformat.write(new, path)
    if (shown := picture(new)) is not None:
        path.with_suffix(".png").write_bytes(shown)
    return True


def picture(notebook: nbformat.NotebookNode) -> bytes | None:
    """Take the figure of the cell that is tagged `picture`, which the README shows."""
    for cell in notebook.cells:
        if "picture" in cell.metadata.get("tags", []):
            return base64.b64decode(next(o.data["image/png"] for o in cell.outputs if "data" in o))


def main() -> None:
    for path in tqdm([Path(argument) for argument in sys.argv[1:]], desc="notebooks", disable=None):
        print(f"{path}={'written' if sync(path) else 'unchanged'}")


if __name__ == "__main__":
    main()
