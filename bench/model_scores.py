# SPDX-License-Identifier: Apache-2.0
"""Write how well the cost model predicts published measurements: bench/results/model/published.md.

Run it after a change of the model or of a machine's constants. It measures nothing.
"""

from pathlib import Path

from fastcoll.measure.sizes import format_number, format_size
from fastcoll_model.published import Row, held_out_rows, median_error, unfitted_rows

OUTPUT = Path(__file__).parent / "results" / "model" / "published.md"


def table(rows: list[Row]) -> list[str]:
    lines = ["| system | size | published us | predicted us | error |", "|---|---|---|---|---|"]
    for row in rows:
        size = format_size(row.size_bytes)
        times = f"{row.published_us:g} | {format_number(row.predicted_us)}"
        lines.append(f"| {row.system} | {size} | {times} | {row.error:+.0%} |")
    return lines


def report() -> str:
    fitted, unfitted = held_out_rows(), unfitted_rows()
    sources = dict.fromkeys(f"- {row.system}: {row.source}" for row in fitted)
    lines = [
        "# The cost model against published all_reduce times",
        "",
        "Written by `python bench/model_scores.py`. The published numbers are their authors' own.",
        "",
        "## One alpha and one beta per series, fitted to every second size",
        "",
        f"Median error of the {len(fitted)} sizes that the fit did not see: "
        f"**{median_error(fitted):.1%}**. Where a library changes its algorithm or protocol "
        "between two sizes, one line can't follow.",
        "",
        *table(fitted),
        "",
        "## The shipped constants alone, fitted to nothing",
        "",
        f"Median error of {len(unfitted)} sizes: **{median_error(unfitted):.0%}**. The topology's "
        "constants know links; they don't know what launching a kernel and meeting at a barrier "
        "cost, which is most of a small message, nor how many SMs a library spends on a large one.",
        "",
        *table(unfitted),
        "",
        "## Sources",
        "",
        *sources,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(report(), encoding="utf-8")
    print(f"wrote {OUTPUT}")
