"""The course's figures: titles say the finding, axes have units, one colour for one thing everywhere.

Only notebooks and tests import this; the steps run without matplotlib.
"""

import matplotlib.pyplot as plt

# Okabe and Ito's colours: told apart by colour-blind readers, and of different brightness in greyscale.
COLOURS = {"anonymous": "#0072B2", "file": "#F0E442", "bound": "#000000"}

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
