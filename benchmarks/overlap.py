"""Does a trainer that computes all the time wait for the real service?

    python benchmarks/overlap.py [--corpus DIR] [--hostile DIR] [--repeats 5] [--steps 20]
        [--row NAME ...] [--latency SECONDS] [--cores RANK,SERVICE] [--work DIR]

One rank is pinned to one core, the service (Ray, coordinator, planner, one worker) to another. A
micro-batch is computed for a set time: the rank multiplies matrices, so its core is never idle and
the client's thread has to take its share of it. First in every round the service's capacity is
measured where it runs: packs a second of a rank that computes nothing, over the same steps as the
rows. From it follows the set time: capacity over demand is 2 in the first three rows, 1.3 in the
others.

    bare            nothing is fetched before the rank asks for it, over gRPC
    prefetch        with the default, adaptive depth, over gRPC
    local           the same through shared memory, as the default is on one host
    just            the same, and the service is just fast enough
    hostile         as before, over a mix with damaged and hostile pictures (`--hostile`: a folder
                    of them) and one source in a store whose every read takes `--latency`

"step/compute" is the time of the steps over the time computed in them; "step/work" the same over
the CPU seconds computed, which is what a rank would see that computes on the core the client's
thread runs on; "client" the CPU seconds of the client's threads over the time computed. Each run
starts the plan anew and leaves out its first steps; rows take turns; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from figures import Figure, machine, show, show_reached
from measuring import SPAWN
from reports import aligned

MICRO_STEPS = 4
MATRIX = 256
"""Side; a product takes about a millisecond and lets other threads run."""
LIMIT_S = 600.0
"""Of one run."""
MOST_RATIO, MOST_WAIT = 1.02, 0.02
SLACK = 1.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    name: str
    mix: str
    headroom: float
    """Capacity over demand."""
    options: dict[str, Any]
    """Of the PackStream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    endpoint: str
    options: dict[str, Any]
    compute_s: float
    """Of a micro-batch."""
    warm_steps: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    seconds: float
    computed_s: float
    worked_s: float
    """CPU time of the computing thread while it computed."""
    client_s: float
    """CPU time of all else in the process."""
    waited_s: float
    longest_s: float
    packs: int
    prefetch_packs: int
    """The depth at the end."""

    @property
    def ratio(self) -> float:
        return self.seconds / self.computed_s


def rows() -> list[Row]:
    from overlap_data import GOOD, MIXED

    return [
        Row(name="bare", mix=GOOD, headroom=2.0, options={"prefetch_packs": 0, "local": False}),
        Row(name="prefetch", mix=GOOD, headroom=2.0, options={"local": False}),
        Row(name="local", mix=GOOD, headroom=2.0, options={}),
        Row(name="just", mix=GOOD, headroom=SLACK, options={}),
        Row(name="hostile", mix=MIXED, headroom=SLACK, options={}),
    ]


# ---- the rank's process -------------------------------------------------------------------------


def rank(core: int, pipe: Any) -> None:
    """Answers each Run with its Outcome until there is None."""
    os.sched_setaffinity(0, [core])
    while (run := pipe.recv()) is not None:
        pipe.send(train(run))


def train(run: Run) -> Outcome:
    import numpy as np
    from overlap_data import JOB

    from trainer_client import PackStream, ParallelLayout

    matrix = np.ones((MATRIX, MATRIX), np.float32)

    def compute() -> tuple[float, float]:
        began, worked = time.monotonic(), time.thread_time()
        while time.monotonic() - began < run.compute_s:
            matrix @ matrix
        return time.monotonic() - began, time.thread_time() - worked

    with PackStream(
        run.endpoint,
        job=JOB,
        layout=ParallelLayout(),
        micro_steps=MICRO_STEPS,
        run_id=uuid.uuid4().hex,
        timeout_s=LIMIT_S,
        **run.options,
    ) as stream:
        for _ in range(run.warm_steps * MICRO_STEPS):
            next(stream)
            compute()
        computed = worked = 0.0
        packs, waits = 0, []
        began, cpu, own = time.monotonic(), time.process_time(), time.thread_time()
        for _ in range(run.steps * MICRO_STEPS):
            meta = next(stream).meta
            packs += meta["num_packs"]
            waits.append(meta["waited_s"])
            took, of_it = compute()
            computed, worked = computed + took, worked + of_it
        seconds = time.monotonic() - began
        spent, own = time.process_time() - cpu, time.thread_time() - own
        depth = stream.stats().prefetch_packs
    return Outcome(
        seconds=seconds,
        computed_s=computed,
        worked_s=worked,
        client_s=spent - own,
        waited_s=sum(waits),
        longest_s=max(waits),
        packs=packs,
        prefetch_packs=depth,
    )


# ---- the measuring ------------------------------------------------------------------------------


@contextmanager
def rank_on(core: int) -> Iterator[Callable[[Run], Outcome]]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=rank, args=(core, theirs), daemon=True)
    process.start()
    theirs.close()

    def ask(run: Run) -> Outcome:
        ours.send(run)
        if not ours.poll(LIMIT_S):
            raise SystemExit(f"the rank gave no result within {LIMIT_S:g} s")
        try:
            outcome: Outcome = ours.recv()
        except EOFError:
            raise SystemExit("the rank ended without a result") from None
        return outcome

    try:
        yield ask
    finally:
        process.kill()
        process.join()


@dataclass(kw_only=True)
class Mix:
    """One service with its rows."""

    name: str
    rows: list[Row]
    capacities: list[float] = field(default_factory=list)
    """Packs a second, by round."""


def measure(
    mix: Mix, args: argparse.Namespace, ask: Callable[[Run], Outcome], endpoint: str
) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = defaultdict(list)

    def run(options: dict[str, Any], compute_s: float) -> Outcome:
        return ask(
            Run(
                endpoint=endpoint,
                options=options,
                compute_s=compute_s,
                warm_steps=args.warm_steps,
                steps=args.steps,
            )
        )

    run({}, 0.0)  # plans and caches what all others find there
    for number in range(args.repeats):
        alone = run({}, 0.0)
        capacity = alone.packs / alone.seconds
        mix.capacities.append(capacity)
        say(f"{mix.name}, round {number + 1}: capacity {capacity:.1f} packs/s")
        for row in mix.rows[:: -1 if number % 2 else 1]:
            outcome = run(row.options, row.headroom / capacity)
            found[row.name].append(outcome)
            say(f"  {row.name}: {outcome.ratio:.4f}")
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(mixes: list[Mix], found: dict[str, list[Outcome]]) -> list[str]:
    head = ("row", "capacity/demand", "compute ms", "step/compute", "(of runs)", "step/work")
    lines = [(*head, "waited %", "longest ms", "client %", "depth")]
    for mix in mixes:
        for row in mix.rows:
            runs = found[row.name]
            ratios = sorted(run.ratio for run in runs)
            lines.append(
                (
                    row.name,
                    f"{row.headroom:g}",
                    f"{1000 * median(runs, lambda run: run.computed_s / run.packs):.1f}",
                    f"{statistics.median(ratios):.4f}",
                    f"{ratios[0]:.4f}-{ratios[-1]:.4f}",
                    f"{median(runs, lambda run: run.seconds / run.worked_s):.3f}",
                    f"{100 * waiting(runs):.2f}",
                    f"{1000 * median(runs, lambda run: run.longest_s):.1f}",
                    f"{100 * median(runs, lambda run: run.client_s / run.computed_s):.1f}",
                    f"{median(runs, lambda run: run.prefetch_packs):g}",
                )
            )
    return aligned(lines)


def median(runs: list[Outcome], of: Callable[[Outcome], float]) -> float:
    return statistics.median(of(run) for run in runs)


def waiting(runs: list[Outcome]) -> float:
    """Share of step time."""
    return median(runs, lambda run: run.waited_s / run.seconds)


def figures(mixes: list[Mix], found: dict[str, list[Outcome]]) -> list[Figure]:
    made = [
        Figure(
            name=f"capacity, {mix.name}",
            value=statistics.median(mix.capacities),
            unit="packs/s",
            note=f"of rounds {min(mix.capacities):.1f} to {max(mix.capacities):.1f}: what was "
            "measured counts where these are close",
        )
        for mix in mixes
    ]
    for row in (row for mix in mixes for row in mix.rows if row.headroom == SLACK):
        runs = found[row.name]
        ratio, wait = median(runs, lambda run: run.ratio), waiting(runs)
        made += [
            Figure(
                name=f"{row.name}: step time over compute time",
                value=ratio,
                unit="",
                target=f"at most {MOST_RATIO}",
                reached=ratio <= MOST_RATIO,
            ),
            Figure(
                name=f"{row.name}: wait",
                value=100 * wait,
                unit="% of step time",
                target=f"below {100 * MOST_WAIT:g}",
                reached=wait < MOST_WAIT,
            ),
        ]
    return made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [row.name for row in rows()]
    parser.add_argument("--row", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help=f"of {MICRO_STEPS} micro-batches")
    parser.add_argument("--warm-steps", type=int, default=6)
    parser.add_argument("--corpus", type=Path, help="a folder with zips of pictures")
    parser.add_argument("--hostile", type=Path, help="a folder of hostile pictures")
    parser.add_argument("--latency", type=float, default=0.2, help="of the slow store, seconds")
    parser.add_argument("--cores", type=lambda text: [int(core) for core in text.split(",")])
    parser.add_argument("--work", type=Path, help="where the data go (about 100 MB)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.cores = args.cores or sorted(os.sched_getaffinity(0))[:2]
    if len(args.cores) != 2:
        parser.error("needs two cores: one for the rank, one for the service")
    return args


def main() -> int:
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    about = machine()
    os.sched_setaffinity(0, args.cores[1:])
    import slow_store
    from overlap_data import config_text, write_sources

    from dataservice.actors.launch import running_service
    from dataservice.config import load_config
    from dataservice.indexing import update_index
    from dataservice.pipeline.images import decoder_fingerprint

    found: dict[str, list[Outcome]] = {}
    chosen = [row for row in rows() if row.name in args.row]
    mixes = [
        Mix(name=mix, rows=[row for row in chosen if row.mix == mix])
        for mix in dict.fromkeys(row.mix for row in chosen)
    ]
    with (
        tempfile.TemporaryDirectory(dir=args.work, prefix="overlap-") as name,
        rank_on(args.cores[0]) as ask,
    ):
        folder = Path(name)
        slow_store.install(folder / "packages")
        write_sources(folder / "data", corpus=args.corpus, hostile=args.hostile, seed=args.seed)
        for mix in mixes:
            path = folder / f"{mix.name.partition(' ')[0]}.yaml"
            path.write_text(config_text(folder, mix.name))
            config = load_config(path)
            os.environ[slow_store.LATENCY] = "0"
            update_index(config)
            os.environ[slow_store.LATENCY] = str(args.latency)
            with running_service(config) as service:
                found |= measure(mix, args, ask, service.endpoint)
    print(f"machine:  {about}; rank on core {args.cores[0]}, service on core {args.cores[1]}")
    names = ("ray", "torch", "numpy", "grpcio")
    print(f"versions: {', '.join(f'{name} {version(name)}' for name in names)}")
    print(f"decoder:  {decoder_fingerprint()}")
    print(f"pictures: {'of a corpus' if args.corpus else 'made up'}, hostile ones: ", end="")
    print("damaged and hostile" if args.hostile else "damaged alone")
    print(f"command:  python {' '.join(sys.argv)}\n")
    print("\n".join(table(mixes, found)), end="\n\n")
    shown = figures(mixes, found)
    for figure in shown:
        show(figure)
    return 0 if show_reached(shown) else 1


if __name__ == "__main__":
    sys.exit(main())
