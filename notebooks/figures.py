"""The course's figures: titles say the finding, axes have units, one colour for one thing everywhere.

Only notebooks and tests import this; the steps run without matplotlib.
"""

import matplotlib.pyplot as plt

# Okabe and Ito's colours: told apart by colour-blind readers, and of different brightness in greyscale.
COLOURS = {
    "anonymous": "#0072B2",
    "file": "#F0E442",
    "bound": "#000000",
    "cpu": "#E69F00",
    "disk": "#999999",
    "transfer": "#E69F00",
    "compute": "#0072B2",
    "drop": "#999999",
}
GPU_COLOURS = ["#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#882255", "#44AA99", "#DDCC77"]

plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100})


def peak_bars(peaks: dict[str, dict], size_mb: float, title: str) -> plt.Figure:
    """Draw the peak memory of several ways of loading, in MiB, beside one and two times the model's size.

    `peaks` maps a way to what step 3's `measure_rss` returns for it.
    """
    figure, axes = plt.subplots(figsize=(8, 0.7 * len(peaks) + 1.9))
    in_files = [growth["file_mb"] for growth in peaks.values()]
    anonymous = [growth["peak_mb"] - growth["file_mb"] for growth in peaks.values()]
    axes.barh(list(peaks), anonymous, color=COLOURS["anonymous"], height=0.6, label="anonymous memory")
    bars = axes.barh(
        list(peaks), in_files, left=anonymous, color=COLOURS["file"], hatch="//", height=0.6, label="file-backed"
    )
    axes.bar_label(bars, labels=[f"{growth['peak_mb']:.0f} MiB" for growth in peaks.values()], padding=4)
    for times in (1, 2):
        axes.axvline(times * size_mb, color=COLOURS["bound"], linestyle="--", linewidth=1)
        axes.text(times * size_mb, -0.75, f" {times} x the model", va="center", fontsize=10)
    highest = max(growth["peak_mb"] for growth in peaks.values())
    axes.set(title=title, xlabel="peak RSS above the imports (MiB)", xlim=(0, 1.2 * max(highest, 2 * size_mb)))
    axes.set_ylim(len(peaks) - 0.5, -1.0)
    figure.legend(loc="lower right", ncols=2, frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def rss_curves(ways: dict[str, dict], levels: dict[str, float], title: str) -> plt.Figure:
    """Draw the memory of several processes over time, in MiB, and dashed levels to compare them with.

    `ways` maps a way to what step 3's `measure_rss` returns for it.
    """
    figure, axes = plt.subplots(figsize=(8, 4))
    colours = [GPU_COLOURS[index] for index in (0, 4, 2, 3)]
    for (way, growth), colour, style in zip(ways.items(), colours, ("-", "--", "-.", ":"), strict=False):
        seconds, mb = zip(*growth["curve"], strict=True)
        axes.plot(seconds, mb, style, color=colour, linewidth=2, label=f"{way}: peak {growth['peak_mb']:.0f} MiB")
    last = max(growth["curve"][-1][0] for growth in ways.values())
    for name, level in levels.items():
        axes.axhline(level, color=COLOURS["bound"], linestyle=":", linewidth=1)
        axes.text(last, level, name, ha="right", va="bottom", fontsize=10)
    axes.set(title=title, xlabel="time (s)", ylabel="RSS above the imports (MiB)", ylim=(0, None), xlim=(0, None))
    figure.legend(loc="lower center", ncols=2, frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    return figure


def race_bars(results: dict, title: str) -> plt.Figure:
    """Draw the seconds of a forward for each rival, from the disk and cached, beside the two floors.

    `results` is what `versus_accelerate.race` returns.
    """
    rivals = [rival for rival in results if rival not in ("raw_read", "resident")]
    figure, axes = plt.subplots(figsize=(8, 0.75 * len(rivals) + 1.9))
    for shift, temperature, colour, hatch in (
        (-0.2, "cold", COLOURS["disk"], ""),
        (0.2, "warm", COLOURS["cpu"], "//"),
    ):
        seconds = [results[rival][temperature]["forward_seconds"] for rival in rivals]
        rows = [row + shift for row in range(len(rivals))]
        label = "from the disk" if temperature == "cold" else "cached"
        bars = axes.barh(rows, seconds, height=0.38, color=colour, hatch=hatch, edgecolor="white", label=label)
        axes.bar_label(bars, fmt="%.2f s", padding=3, fontsize=9)
    floors = {"compute": results["resident"]["warm"], "read": results["raw_read"]["cold"]}
    for height, (name, run) in zip((-0.75, -1.05), floors.items(), strict=True):
        axes.axvline(run["forward_seconds"], color=COLOURS["bound"], linestyle=":", linewidth=1)
        axes.text(run["forward_seconds"], height, f" {name} alone", va="center", fontsize=9)
    axes.set_yticks(range(len(rivals)), [rival.replace("_", " ") for rival in rivals])
    axes.set_ylim(len(rivals) - 0.5, -1.3)
    axes.set(title=title, xlabel="time of a forward (s)")
    figure.legend(loc="lower right", ncols=2, frameon=False, fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def memory_over_tokens(runs: dict[str, tuple], total_bytes: int, title: str) -> plt.Figure:
    """Draw the bytes of weights that are in memory while a model answers, token by token, for several budgets.

    `runs` maps a budget to the `resident_bytes` of step 6's `OffloadTrace`, and where in them each token begins.
    """
    figure, axes = plt.subplots(figsize=(8, 4))
    for (budget, (resident, starts)), colour in zip(runs.items(), GPU_COLOURS[0::2], strict=False):
        ends = [*starts[1:], len(resident)]
        tokens = [
            token + step / (end - start)
            for token, (start, end) in enumerate(zip(starts, ends, strict=True))
            for step in range(end - start)
        ]
        axes.step(tokens, [size / 2**20 for size in resident], where="post", color=colour)
        axes.text(tokens[-1], resident[-1] / 2**20, f" {budget}", va="center", fontsize=10)
    axes.axhline(total_bytes / 2**20, color=COLOURS["bound"], linestyle=":", linewidth=1)
    axes.text(0, total_bytes / 2**20, "the whole model", va="bottom", fontsize=10)
    axes.set(title=title, xlabel="tokens answered", ylabel="weights in memory (MiB)", ylim=(0, None), xlim=(0, None))
    figure.tight_layout()
    return figure


def speed_over_batch(curves: dict[str, list[float]], batches: list[int], title: str) -> plt.Figure:
    """Draw the tokens per second of several ways to bring weights, over the tokens that are computed at once."""
    figure, axes = plt.subplots(figsize=(8, 4))
    styles = zip(curves.items(), GPU_COLOURS, ("-", "--", "-.", ":"), strict=False)
    for (name, speeds), colour, style in styles:
        axes.plot(batches, speeds, style, color=colour, linewidth=2, label=name)
    axes.set(xscale="log", yscale="log", title=title, xlabel="tokens in one forward", ylabel="tokens per second")
    axes.legend(frameon=False, fontsize=10)
    figure.tight_layout()
    return figure


def device_colour(device: int | str) -> str:
    """Give each device the colour that it has in every figure."""
    return GPU_COLOURS[device % len(GPU_COLOURS)] if isinstance(device, int) else COLOURS[device]


def device_name(device: int | str) -> str:
    """Write a device as the figures call it."""
    return f"GPU {device}" if isinstance(device, int) else device


def device_bars(plans: dict, title: str) -> plt.Figure:
    """Draw for several plans what each device holds, unit by unit, in MiB, beside its budget.

    `plans` maps a label to the books of step 5 (a `Packer`).
    """
    figure, rows = plt.subplots(len(plans), 1, figsize=(8, 1.35 * len(plans) + 0.8), sharex=True, squeeze=False)
    for axes, (label, packer) in zip(rows[:, 0], plans.items(), strict=True):
        devices = [device for device in packer.devices if packer.used[device] or isinstance(device, int)]
        for row, device in enumerate(devices):
            start = 0
            for unit in packer.units:
                if packer.place_of[unit.name] == device:
                    size = sum(unit.sizes.values()) / 2**20
                    axes.barh(row, size, left=start, color=device_colour(device), edgecolor="white", height=0.7)
                    start += size
            if packer.budget[device] < 1e3 * max(packer.used.values()):
                budget = packer.budget[device] / 2**20
                axes.plot([budget, budget], [row - 0.45, row + 0.45], "--", color=COLOURS["bound"], linewidth=1)
        axes.set_yticks(range(len(devices)), [device_name(device) for device in devices])
        axes.invert_yaxis()
        axes.set_ylabel(label, rotation=0, ha="right", va="center", labelpad=45)
    axes.set_xlabel("bytes held (MiB); dashed: the budget")
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    return figure


def share_bars(shares: dict[int, dict], title: str) -> plt.Figure:
    """Draw how much of a model is on accelerators, in RAM and on disk, in GiB, for several numbers of GPUs."""
    figure, axes = plt.subplots(figsize=(8, 0.6 * len(shares) + 1.6))
    for row, used in enumerate(shares.values()):
        start = 0
        for device, size in used.items():
            gib = size / 2**30
            axes.barh(row, gib, left=start, color=device_colour(device), edgecolor="white", height=0.65)
            if gib > 6:
                colour = "white" if device_colour(device) in ("#0072B2", "#882255") else "black"
                axes.text(
                    start + gib / 2, row, device_name(device), ha="center", va="center", fontsize=9, color=colour
                )
            start += gib
    axes.set_yticks(range(len(shares)), [f"{count} GPU{'s' if count > 1 else ''}" for count in shares])
    axes.invert_yaxis()
    axes.set(title=title, xlabel="bytes of the model (GiB)")
    figure.tight_layout()
    return figure


def timeline(happened, forecast_bytes: int, title: str) -> plt.Figure:
    """Draw when each block came, ran and went, and under it the bytes that were there, beside the forecast.

    `happened` is step 6's `OffloadTrace` of one forward.
    """
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5.6), sharex=True, height_ratios=[2, 1])
    blocks = list(dict.fromkeys(event.block for event in happened.events if event.block))
    next_part = {"bring": "transfer", "run": "compute", "drop": "drop"}
    started = {}
    for event in happened.events:
        begun = started.pop(event.block, None)
        if begun is not None and event.block:
            row, colour = blocks.index(event.block), COLOURS[next_part[begun.kind]]
            above.barh(row, 1e3 * (event.seconds - begun.seconds), left=1e3 * begun.seconds, color=colour, height=0.8)
        if event.kind != "end":
            started[event.block] = event
    above.set_yticks(range(len(blocks)), blocks, fontsize=9)
    above.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[part]) for part in next_part.values()]
    above.legend(handles, ["transfer", "compute", "drop"], loc="upper right", frameon=False, fontsize=10)
    above.set_title(title)
    milliseconds = [1e3 * event.seconds for event in happened.events]
    below.step(
        milliseconds, [size / 2**20 for size in happened.resident_bytes], where="post", color=COLOURS["anonymous"]
    )
    below.axhline(forecast_bytes / 2**20, color=COLOURS["bound"], linestyle="--", linewidth=1)
    below.text(0, forecast_bytes / 2**20, " the plan's forecast", va="bottom", fontsize=10)
    below.set(xlabel="time (ms)", ylabel="on the device (MiB)", ylim=(0, 1.25 * forecast_bytes / 2**20))
    figure.tight_layout()
    return figure


def two_streams(schedules: dict[str, dict], title: str) -> plt.Figure:
    """Draw when each block is copied and when it computes, for several schedules: stream -> begin and end in ms."""
    figure, rows = plt.subplots(len(schedules), 1, figsize=(8, 1.25 * len(schedules) + 1), sharex=True, squeeze=False)
    for axes, (label, streams) in zip(rows[:, 0], schedules.items(), strict=True):
        for row, (stream, colour) in enumerate({"copy": "transfer", "compute": "compute"}.items()):
            for number, (begin, end) in enumerate(streams[stream]):
                axes.barh(row, end - begin, left=begin, color=COLOURS[colour], edgecolor="white", height=0.8)
                ink = "black" if stream == "copy" else "white"
                axes.text((begin + end) / 2, row, number, ha="center", va="center", fontsize=9, color=ink)
        axes.set_yticks([0, 1], ["copy", "compute"])
        axes.invert_yaxis()
        axes.set_ylabel(label, rotation=0, ha="right", va="center", labelpad=55)
    axes.set_xlabel("time (ms)")
    figure.suptitle(title, fontsize=12)
    figure.tight_layout()
    return figure
