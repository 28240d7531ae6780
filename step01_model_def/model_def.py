"""Step 1: a Transformer small enough to read, and the same Transformer too large to load.

You learn how many parameters a model has, by counting and by a formula, and what they weigh in bytes.
Prints the size of `tiny`, the shape of its logits, and the bytes of four configurations in float32 and
float16. Nothing is written.
"""

import sys

try:
    import torch
    from torch import nn
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run `make`, or `pip install -r requirements.txt` in the activated .venv") from None

SEED = 47

SIZES = ("vocab_size", "hidden_size", "num_heads", "num_layers", "num_classes", "max_length")
CONFIGS = {
    # 0.6 MB in float32: everything in this course can be checked on it
    "tiny": dict(zip(SIZES, (128, 64, 4, 3, 2, 16), strict=True)),
    # 0.1 GB: large enough to be seen in a process's memory
    "small": dict(zip(SIZES, (1000, 512, 8, 8, 2, 128), strict=True)),
    # 0.8 GB: loading it carelessly is felt
    "medium": dict(zip(SIZES, (1000, 1024, 16, 16, 2, 128), strict=True)),
    # 259 GB: as large as the open models of 70 billion parameters; only ever on the meta device
    "giant": dict(zip(SIZES, (32000, 8192, 64, 80, 2, 4096), strict=True)),
}


def config_problems(vocab_size, hidden_size, num_heads, num_layers, num_classes, max_length) -> list[str]:
    """Say everything that is wrong with a configuration, one text a problem; an empty list is a good one."""
    wrong = {name: size for name, size in locals().items() if type(size) is not int or size < 1}
    problems = [f"{name} must be a whole number of at least 1, not {size!r}" for name, size in wrong.items()]
    if not problems and hidden_size % num_heads:
        mend = "each head takes hidden_size / num_heads columns; choose a num_heads that divides it"
        problems.append(f"num_heads={num_heads} does not divide hidden_size={hidden_size}: {mend}")
    return problems


def raise_all(problems: list[str], what: str = "", error: type[Exception] = ValueError, between: str = "; ") -> None:
    """Raise one error that says `what` is wrong and lists all problems; where there are none, do nothing."""
    if problems:
        raise error(what + between.join(problems))


class TinyTransformerClassifier(nn.Module):
    """A Transformer encoder that sorts sequences of token ids into classes.

    Input: int64 ids of shape (batch, seq) with seq <= max_length. Output: logits (batch, num_classes).
    The parts are PyTorch's own, as in "Attention Is All You Need" (Vaswani et al., 2017), encoder side.
    Raises ValueError for a configuration that cannot work, naming everything wrong with it.
    """

    def __init__(self, vocab_size, hidden_size, num_heads, num_layers, num_classes, max_length):
        raise_all(config_problems(vocab_size, hidden_size, num_heads, num_layers, num_classes, max_length))
        super().__init__()
        self.max_length = max_length
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(max_length, hidden_size)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
        layer = nn.TransformerEncoderLayer(hidden_size, num_heads, 4 * hidden_size, **options)
        self.encoder = nn.TransformerEncoder(layer, num_layers)
        for parameter in self.encoder.parameters():
            if parameter.dim() > 1:  # else all layers are equal, and a mistaken one would not be noticed
                nn.init.xavier_uniform_(parameter)
        self.classifier = nn.Linear(hidden_size, num_classes)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        batch, seq = input_ids.shape
        if seq > self.max_length:
            raise ValueError(f"a sequence of {seq} tokens is longer than max_length={self.max_length}: cut it")
        positions = torch.arange(seq, device=input_ids.device)  # (seq,)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)  # (batch, seq, hidden)
        x = self.encoder(x)  # (batch, seq, hidden)
        x = x.mean(dim=1)  # (batch, hidden)
        return self.classifier(x)  # (batch, num_classes)


def count_parameters(model: nn.Module) -> int:
    """Count the numbers in all parameters; a tied parameter counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_meta_parameters(model: nn.Module) -> int:
    """Count the parameter tensors that are on the meta device: they have a shape and no values (step 3)."""
    return sum(parameter.is_meta for parameter in model.parameters())


def parameters_by_formula(vocab_size, hidden_size, num_heads, num_layers, num_classes, max_length) -> int:
    """Count the parameters without building anything; the number of heads does not matter."""
    h = hidden_size
    embeddings = vocab_size * h + max_length * h
    attention = (3 * h * h + 3 * h) + (h * h + h)  # in_proj for q, k and v together; out_proj
    feed_forward = (4 * h * h + 4 * h) + (4 * h * h + h)
    layer_norms = 2 * 2 * h
    classifier = h * num_classes + num_classes
    return embeddings + num_layers * (attention + feed_forward + layer_norms) + classifier


def format_bytes(count: int) -> str:
    """Write a number of bytes for people: `512 B`, `622.3 KiB`, `240.2 GiB` (1 KiB = 1024 B)."""
    if abs(count) < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if abs(size) < 1023.95 or unit == "TiB":
            return f"{size:.1f} {unit}"


def fixed_sequences(vocab_size: int, seq: int = 8) -> torch.Tensor:
    """Make the two sequences of token ids that every step runs: one counts up, one counts down."""
    up = torch.arange(seq) % vocab_size  # (seq,)
    return torch.stack([up, up.flip(0)])  # (2, seq)


def run_script(main) -> None:
    """Run a step's `main`; an error that a learner can mend ends in one line, not in a traceback.

    Functions raise ValueError for a bad argument, its child CheckpointError (step 2) for a bad file, and
    OSError for a disk that is full or read-only. What is imported late is of `requirements-dev.txt`. PyTorch
    says RuntimeError when there is no memory.
    """
    try:
        main()
    except ModuleNotFoundError as error:
        sys.exit(f"ModuleNotFoundError: {error}; pip install -r requirements-dev.txt brings it")
    except (ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except (MemoryError, RuntimeError) as error:
        if "allocate" not in str(error) and not isinstance(error, MemoryError):
            raise
        sys.exit("MemoryError: not enough memory; close programs or take a smaller --config; `make doctor` says more")


def main() -> None:
    torch.manual_seed(SEED)
    model = TinyTransformerClassifier(**CONFIGS["tiny"]).eval()
    with torch.inference_mode():
        logits = model(fixed_sequences(CONFIGS["tiny"]["vocab_size"]))  # (2, num_classes)
    print("config=tiny")
    print(f"parameters={count_parameters(model)}")
    print(f"parameter_tensors={len(list(model.parameters()))}")
    print(f"meta_parameter_tensors={count_meta_parameters(model)}")
    print(f"logits_shape={list(logits.shape)}")
    for name, config in CONFIGS.items():
        count = parameters_by_formula(**config)
        print(f"{name}_parameters={count}")
        print(f"{name}_float32_bytes={4 * count} ({format_bytes(4 * count)})")
        print(f"{name}_float16_bytes={2 * count} ({format_bytes(2 * count)})")
    print(f"a_7b_model_float32_bytes={4 * 6_700_000_000} (26.8 GB: 6.7 billion parameters x 4 bytes)")


if __name__ == "__main__":
    run_script(main)
