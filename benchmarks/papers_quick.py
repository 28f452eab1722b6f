"""Run every table of every paper at quick scale, a paper per processor core, and print a line per table.

    python -m benchmarks.papers_quick [--minutes 60]

Finished rows are kept below runs/papers: the same command continues where it stopped. The exit code is 1 if a row
failed, or if rows are left after the time. Without the data files, bundled images take their place.
"""

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from gradveil.core.errors import GradveilError
from gradveil.core.formatting import duration
from gradveil.papers import find_study, row_runs, studies
from gradveil.runs.pool import cores


def main() -> int:
    """Run the tables until all are done or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="stop after this time (default: 60)")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "papers", help="folder of the runs of papers")
    parser.add_argument("papers", nargs="*", help="keys of papers (default: all)")
    args = parser.parse_args()
    start, keys = time.monotonic(), args.papers or list(studies())
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(quick_tables, key, args.runs, time.time() + 60 * args.minutes) for key in keys]
        bad = sum(done.result() for done in as_completed(running))
    print(
        f"{'all tables ran' if not bad else f'{bad} tables failed or are left'}, {duration(time.monotonic() - start)}"
    )
    return bad > 0


def quick_tables(key: str, runs: Path, end: float) -> int:
    """Run the tables of a paper until a time, and return how many failed or are left."""
    study, bad = find_study(key), 0
    for entry in study.tables.values():
        if entry.reason:
            continue
        start, expected, notes = time.time(), len(row_runs(study, entry.name, "quick")), list[str]()
        try:
            left = max(end - start, 0.0)
            records = study.run(entry.name, "quick", runs=runs, seconds=left, tell=notes.append, progress=False)
        except GradveilError as error:  # refused rows are named after the others of the table
            bad += 1
            print(f"FAILED {key} {entry.name}:\n       {error}", flush=True)
            continue
        failed = [record for record in records if record.status != "complete"]
        missing = [note for note in notes if note.startswith("NO DATA")]
        data = "bundled images" if missing else "its data"
        state = "FAILED" if failed else "LEFT" if len(records) < expected else "ok"
        bad += state != "ok"
        lines = [f"{state:6} {key} {entry.name}: {len(records)} of {expected} rows, {data}, "]
        lines[0] += duration(time.time() - start)
        lines += [f"       {note}" for note in missing]
        lines += [f"       {record.run}: {record.defence}, {record.attack}: {record.status}" for record in failed]
        print("\n".join(lines), flush=True)
    return bad


if __name__ == "__main__":
    raise SystemExit(main())
