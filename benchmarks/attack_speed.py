"""How fast the attack loop is, against the loops that people use: target-iterations a second, interleaved in one run.

    python benchmarks/attack_speed.py [--peer FOLDER/bin/python] [--models lenet-zhu ...] [--output FILE]
    python benchmarks/attack_speed.py --device cuda --output FILE

Compared are a plain loop over one target client (`loops.plain_loop`), the published `breaching` package if `--peer`
names the Python of an environment that has it (`sh benchmarks/peer_environment.sh FOLDER`), and Gradveil's `Inversion`.
Every contender is a process that waits while another works. A ratio is taken within one round and the median over the
rounds is reported with its quartiles. Per core: one thread each, processor seconds, which other programs on the machine
disturb less. Whole machine: one Gradveil process a core with one thread each, wall seconds, against the plain loop as
it ships (one process) with one thread or with all, whichever is faster in that round. On a GPU every contender is one
process that has it to itself, and seconds are wall seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

import torch
from loops import gradveil_attack, model_of, plain_loop, truth_of
from torch.utils.flop_counter import FlopCounterMode

HERE = Path(__file__).parent
TARGETS = {"lenet-zhu": (4.0, 8.0), "scheliga-cnn": (4.0, 8.0), "resnet18": (1.2, None), "vit": (1.2, None)}
"""Model -> at least so many times the plain loop, per core and on the whole machine."""
FORWARDS = 7
"""Forward passes' worth of arithmetic in one iteration, if nothing is computed in vain."""


class Loop:
    """One contender: a process that waits for work."""

    def __init__(self, kind: str, model: str, threads: int, python: str = sys.executable, device: str = "cpu") -> None:
        """Start it."""
        command = [python, str(HERE / "loops.py"), kind, model, str(threads), device]
        environment = {**os.environ, "HYDRA_FULL_ERROR": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
        )

    def start(self, target_clients: int, iterations: int) -> None:
        """Give it work."""
        assert self.process.stdin is not None
        print(target_clients, iterations, file=self.process.stdin, flush=True)

    def seconds(self) -> tuple[float, float]:
        """Wait for its answer: wall and processor seconds."""
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{' '.join(map(str, self.process.args))} ended with status {self.process.wait()}")
        wall, busy = map(float, answer.split())
        return wall, busy

    def rates(self, target_clients: int, iterations: int) -> tuple[float, float]:
        """Target-iterations per wall second and per processor second of one call."""
        self.start(target_clients, iterations)
        wall, busy = self.seconds()
        return target_clients * iterations / wall, target_clients * iterations / busy

    def stop(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def contenders(model: str, peer: str | None, device: str, *, one_thread: bool) -> Iterator[dict[str, Loop]]:
    """Start every process for one model."""
    threads = os.cpu_count() or 1
    with ExitStack() as stack:
        if device != "cpu":
            loops = {kind: Loop(kind, model, 1, device=device) for kind in ("plain", "gradveil")}
            for loop in loops.values():
                stack.callback(loop.stop)
            yield loops
            return
        loops = {"plain": Loop("plain", model, 1)}
        if not one_thread:
            loops["plain, all threads"] = Loop("plain", model, threads)
        loops |= {f"gradveil {core}": Loop("gradveil", model, 1) for core in range(threads)}
        if peer:
            loops["breaching"] = Loop("breaching", model, 1, peer)
            if not one_thread:
                loops["breaching, all threads"] = Loop("breaching", model, threads, peer)
        for loop in loops.values():
            stack.callback(loop.stop)
        yield loops


def together(loops: Sequence[Loop], target_clients: int, iterations: int) -> float:
    """Target-iterations a second of several processes that work at the same time, each on its own target clients."""
    began = time.perf_counter()
    for loop in loops:
        loop.start(target_clients, iterations)
    for loop in loops:
        loop.seconds()
    return len(loops) * target_clients * iterations / (time.perf_counter() - began)


def measure(
    loops: dict[str, Loop], counts: Sequence[int], rounds: int, seconds: float
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Measure every contender once a round, each call for about `seconds`.

    Returns for each round the target-iterations a second of one core, and of the whole machine.
    """
    ours = [loop for name, loop in loops.items() if name.startswith("gradveil")]
    peers = {name: loop for name, loop in loops.items() if not name.startswith("gradveil")}
    calls = {name: (loop, 1) for name, loop in peers.items()}
    calls |= {f"gradveil, {count} target clients": (ours[0], count) for count in counts}
    for loop in ours[1:]:
        loop.rates(counts[-1], 2)
    warm = {name: loop.rates(count, 2) for name, (loop, count) in calls.items()}
    speed = {name: loop.rates(count, 4)[0] for name, (loop, count) in calls.items() if name in warm}
    core: list[dict[str, float]] = []
    machine: list[dict[str, float]] = []
    for _ in range(rounds):
        alone: dict[str, float] = {}
        whole: dict[str, float] = {}
        for name, (loop, count) in calls.items():
            speed[name], busy = loop.rates(count, max(4, round(seconds * speed[name] / count)))
            if name in peers:
                whole[name] = speed[name]
            if not name.endswith("all threads"):
                alone[name] = busy
        if len(ours) > 1:
            iterations = max(4, round(seconds * speed[name] / counts[-1]))
            whole[f"gradveil, {counts[-1]} target clients, a process a core"] = together(ours, counts[-1], iterations)
        core.append(alone)
        machine.append(whole)
    return core, machine


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": round(median(values), 3), "q25": round(low, 3), "q75": round(high, 3)}


def gemm_rate(device: str, size: int = 1024, repeats: int = 30) -> float:
    """Measure the rate of large matrix products with one thread, or of a GPU, in FLOP/s."""
    if device != "cpu":
        size = 8192
    a = torch.rand(size, size, device=device)
    times = []
    for _ in range(repeats):
        clock = time.process_time if device == "cpu" else time.perf_counter
        began = clock()
        torch.mm(a, a)
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(clock() - began)
    return 2 * size**3 / min(times)


def agreement(model: str, device: str, iterations: int = 50) -> float:
    """Largest relative difference between Gradveil's and the plain loop's objective after 50 iterations in float64."""
    from gradveil.core.noise import Key

    network = model_of(model).double().to(device)
    images, labels = (values.to(device) for values in truth_of(3, torch.float64))
    found = gradveil_attack(network, images, labels)(iterations).objective
    errors = []
    for target_client, (image, label) in enumerate(zip(images, labels, strict=True)):
        generator = Key(0).child(target_client, 0, "inputs").generator()
        start = torch.rand(image.shape, generator=generator, dtype=torch.float64).to(device)
        value = plain_loop(network, image, label, start, iterations)[-1]
        errors.append(abs(float(found[target_client]) / value - 1))
    return max(errors)


def compare(rounds: list[dict[str, float]], flop: float, gemm: float) -> dict[str, dict]:
    """Compute ratios to the (fastest) plain loop within each round, and print them."""
    rows = {}
    for name in rounds[0]:
        plain = [max(rate for kind, rate in rates.items() if kind.startswith("plain")) for rates in rounds]
        ratio = spread([rates[name] / base for rates, base in zip(rounds, plain, strict=True)])
        rate = spread([rates[name] for rates in rounds])
        share = rate["median"] * flop / gemm
        rows[name] = {"rate": rate, "ratio": ratio, "share_of_gemm": round(share, 3)}
        quartiles = f"{ratio['q25']:.2f} to {ratio['q75']:.2f}"
        print(f"  {name:42} {rate['median']:9.1f} {100 * share:7.1f}% {ratio['median']:8.2f}  {quartiles}")
    return rows


def report(model: str, core: list[dict[str, float]], machine: list[dict[str, float]], gemm: float, device: str) -> dict:
    """Print and return the comparison, and whether it meets the targets; those are for the CPU."""
    place = "one core" if device == "cpu" else "one GPU"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model_of(model)(truth_of(1)[0][0])
    flop = FORWARDS * counter.get_total_flops()
    print(f"\n{model}: {flop / 1e6:.1f} MFLOP an iteration, at most {gemm / flop:,.0f} iterations/s on {place}")
    print(f"  {place:42} {'it/s':>9} {'of GEMM':>8} {'x plain':>8}  quartiles")
    rows = compare(core, flop, gemm)
    ratios = [row["ratio"]["median"] for name, row in rows.items() if name.startswith("gradveil")]
    if device != "cpu":
        return {"flop_an_iteration": flop, "one_gpu": rows, "verdicts": {"never slower": min(ratios) >= 1}}
    print(f"  {'whole machine':42}")
    whole = compare(machine, flop, gemm * (os.cpu_count() or 1))
    per_core, on_machine = TARGETS[model]
    verdicts = {f"at least {per_core}x per core": max(ratios) >= per_core, "never slower": min(ratios) >= 1}
    if on_machine:
        ours = next(row["ratio"]["median"] for name, row in whole.items() if name.startswith("gradveil"))
        verdicts[f"at least {on_machine}x on the whole machine"] = ours >= on_machine
    return {"flop_an_iteration": flop, "one_core": rows, "whole_machine": whole, "verdicts": verdicts}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument(
        "--target-clients", nargs="+", type=int, help="default: 1 2 4 8 32 128, 1 2 4 8 for the large models"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="about the length of one measurement")
    parser.add_argument("--peer", help="Python of the environment with the breaching package")
    parser.add_argument(
        "--one-thread", action="store_true", help="leave out the peers with all threads (busy machines)"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gemm = gemm_rate(options.device)
    gpu = f", {torch.cuda.get_device_name()}" if options.device != "cpu" else ""
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores{gpu}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gemm_gflops_one_thread" if options.device == "cpu" else "gemm_gflops": round(gemm / 1e9, 1),
        "rounds": options.rounds,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    results = {}
    for model in options.models:
        small = TARGETS[model][1] is not None
        counts = options.target_clients or ([1, 2, 4, 8, 32, 128] if small else [1, 2, 4, 8])
        error = agreement(model, options.device)
        with contenders(model, options.peer, options.device, one_thread=options.one_thread) as loops:
            core, machine = measure(loops, counts, options.rounds, options.seconds)
        result = report(model, core, machine, gemm, options.device) | {"relative_difference_after_50_float64": error}
        result["verdicts"]["agrees within 1e-6"] = error <= 1e-6
        for said, holds in result["verdicts"].items():
            print(f"  {'yes' if holds else 'NO '} {said}")
        print(f"  objective after 50 iterations in float64: {error:.1e} relative difference")
        results[model] = result
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(facts | {"models": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
