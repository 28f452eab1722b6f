"""Run every table of every paper at quick scale, and print a line per table.

    python -m benchmarks.papers_quick [--minutes 60]

Finished rows are kept below runs/papers: the same command continues where it stopped. The exit code is 1 if a row
failed, or if rows are left after the time. Without the data files, bundled images take their place.
"""

import argparse
import time
from pathlib import Path

from gradveil.core.formatting import duration
from gradveil.papers import row_runs, studies


def main() -> int:
    """Run the tables until all are done or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="stop after this time (default: 60)")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "papers", help="folder of the runs of papers")
    args = parser.parse_args()
    end, bad = time.monotonic() + 60 * args.minutes, 0
    for key, study in studies().items():
        for entry in study.tables.values():
            if entry.reason:
                continue
            start, expected = time.monotonic(), len(row_runs(study, entry.name, "quick"))
            warnings = list[str]()
            records = study.run(entry.name, "quick", runs=args.runs, seconds=max(end - start, 1), tell=warnings.append)
            failed = [record for record in records if record.status != "complete"]
            data = "bundled images" if any(line.startswith("NO DATA") for line in warnings) else "its data"
            state = "ok" if len(records) == expected and not failed else "FAILED" if failed else "LEFT"
            bad += state != "ok"
            counts = f"{len(records)} of {expected} rows"
            print(f"{state:6} {key} {entry.name}: {counts}, {data}, {duration(time.monotonic() - start)}", flush=True)
            for record in failed:
                print(f"       {record.run}: {record.defence}, {record.attack}: {record.status}")
    return bad > 0


if __name__ == "__main__":
    raise SystemExit(main())
