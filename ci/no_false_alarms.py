"""Right samplers under every law that applies to them, as long as there is time: not one alarm is allowed.

Each case is judged on all samplers that its law is about, at the price of one (`tests/quality/together.py`).
Adds to docs/no_false_alarms.json, with a new seed for each job of a law, and writes docs/no_false_alarms.md.
May be killed at any time: what is lost are the jobs that were running, a minute's work.

    python ci/no_false_alarms.py --seconds 3600      # the least tried laws first
    python ci/no_false_alarms.py --cuda --jobs 16    # `triton` too, on a CUDA device: far more cases a second
    python ci/no_false_alarms.py --render            # the table alone

A law's default is 200 cases; a hundred times that, for each sampler and law, is the aim. Our samplers, and
odd ones that differ in how they round or draw (`FIRST`), come before the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if "--cuda" not in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels run on the CPU
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "quality"), str(ROOT / "tests")]

import together  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, seed  # noqa: E402
from hypothesis.strategies import just  # noqa: E402
from right_samplers import RIGHT  # noqa: E402

from treeconv.backends.registry import get_backend  # noqa: E402
from treeconv.errors import LawBroken  # noqa: E402
from treeconv.laws import BACKEND_LAWS, law_named, why_not  # noqa: E402
from treeconv.shrink import shrink  # noqa: E402
from treeconv.strategies import cases_for  # noqa: E402
from treeconv.suite import DEFAULT_MAX_EXAMPLES, failure_text, suite_settings, with_settings  # noqa: E402

if TYPE_CHECKING:
    from treeconv.case import VerifyCase
    from treeconv.laws import Law

RESULTS, TABLE = ROOT / "docs" / "no_false_alarms.json", ROOT / "docs" / "no_false_alarms.md"
OURS = ("reference", "eager", "triton")
ON_CUDA = "triton on CUDA"
FIRST = (
    "reference",
    "eager",
    ON_CUDA,
    "right_samplers.InFloat64",
    "right_samplers.InReverse",
    "right_samplers.InBfloat16",
    "rng_faults.DrawAndMatch",
)
AIM = 100 * DEFAULT_MAX_EXAMPLES
LONGEST = 40  # seconds after which a job's further cases are left to the next one
SLOW_EVERY = 200  # a slow sampler's share of the cases: one in so many
FEW = 10  # cases of a job for slow samplers alone
BANDED = ("logits", "wide", "chains", "batches", "filtered_logits", "filtered_wide")
HEAD = """# No false alarms

Right samplers, ours and odd ones (`tests/quality/right_samplers.py`), under every law that applies to
them: {cases} cases, {decisions} decisions, **{alarms} alarms**. The aim is {aim} cases for each of
{pairs} pairs of sampler and law; {reached} pairs have reached it so far. {firsts} pairs come first,
those of our samplers (`triton` on a CUDA device), of one in float64, one in bf16, one that sums in
reverse order, and of draw-and-match: of these {first} have reached it, {untried} have no case yet, and
the others have {fewest} at least. A row below counts laws with cases alone. A case counts once for each
sampler judged on it. Few cases are for slow pairs: `triton` in its interpreter, and
`filter_faults.Pivot` under `filters-wide`. Made by `ci/no_false_alarms.py`, which adds to it. Counts are
of the laws and samplers as they are: where one was changed, what it had before was taken out.

The last two things that it flagged were faults. Four of these samplers added up in float32 one token
after the other, and of 1,055 equal masses that came out further off than the oracle's band: they add up
as a device scans now (`test_a_right_sampler_adds_up_thousands_of_equal_masses`). And `triton` took a
chunk's weight for the mass of its largest token, off by 1e-5 far from zero, so that top-p kept a token
too few: that is mended, and `filters-logits` finds it in a case or two, as the planted fault
`kept-mass-of-a-rounded-exponent`.

"""

BAND = """## The ambiguity band

The share of the coin space in which float32 may rightly decide either way: each boundary's band, weighted by
how often its node is met; over 200 generated cases. Dyadic laws have none.
"""

Counts = dict[str, dict[str, list[int]]]  # sampler -> law -> cases, decisions, alarms, jobs


def known_as(made: type) -> str:
    """Its class, with the file that it is in."""
    return f"{made.__module__}.{made.__name__}"


def sampler_named(name: str) -> object:
    """A right sampler, made anew."""
    if name == ON_CUDA:
        return get_backend("triton")
    return get_backend(name) if name in OURS else next(made for made in RIGHT if known_as(made) == name)()


def sampler_names() -> list[str]:
    """Ours, then the odd ones."""
    return [*OURS, ON_CUDA, *map(known_as, RIGHT)]


def can_run(name: str) -> bool:
    """Whether this process can: `triton` is interpreted, or it is on a device."""
    return name not in ("triton", ON_CUDA) or (name == ON_CUDA) == ("TRITON_INTERPRET" not in os.environ)


def is_slow(name: str, law: str) -> bool:
    """Whether a case takes it seconds: in an interpreter, or comparing thousands of tokens pairwise."""
    return name == "triton" or (name, law) == ("filter_faults.Pivot", "filters-wide")


class Job(NamedTuple):
    """Some cases of one law.

    Args:
        law: its name.

        seed: that no job of this law had before.

        samplers: who is judged.

        cases: how many at most.

        slow_every: slow samplers are judged on one case in so many.
    """

    law: str
    seed: int
    samplers: tuple[str, ...]
    cases: int
    slow_every: int


class Found(NamedTuple):
    """What came of a job: sampler -> its cases and decisions; sampler -> what its failure says."""

    job: Job
    cases: Counter[str]
    decisions: Counter[str]
    alarms: dict[str, str]
    seconds: float


def judged(job: Job) -> Found:
    """Cases of one law, each on all its samplers; who is flagged sits out the rest of the job."""
    torch.set_num_threads(1)
    law, drawn, started = law_named(job.law), 0, time.monotonic()
    samplers: Any = {name: sampler_named(name) for name in job.samplers}
    place = 61 * job.seed % job.slow_every  # another one in each job: some end before their last cases
    for name, sampler in samplers.items():
        if name != ON_CUDA:
            sampler.name = name.replace(".", ":")  # as `treeconv replay` loads it
    cuda = samplers.pop(ON_CUDA, None)
    cases: Counter[str] = Counter()
    decisions: Counter[str] = Counter()
    alarms: dict[str, str] = {}

    def judge(case: VerifyCase) -> None:
        nonlocal drawn
        drawn += 1
        if time.monotonic() - started > LONGEST:
            return
        asked = {
            sampler: name
            for name, sampler in samplers.items()
            if name not in alarms and not (is_slow(name, law.name) and drawn % job.slow_every != place)
        }
        verdicts = list(together.judged(law, case, list(asked)))
        if cuda is not None and ON_CUDA not in alarms:
            asked[cuda] = ON_CUDA
            verdicts.append((cuda, *together.alone(law, case, cuda, "cuda")))
        for sampler, count, error in verdicts:
            name = asked[sampler]
            cases[name] += 1
            decisions[name] += count
            if error is not None:
                alarms[name] = alarm(law, case, sampler, error, "cuda" if sampler is cuda else "cpu")

    with_settings(given(case=cases_for(law.cases))(judge), law.name, job.cases, f"together {job.seed}")()
    return Found(job, cases, decisions, alarms, time.monotonic() - started)


def alarm(law: Law, case: VerifyCase, sampler: Any, error: Exception, device: str) -> str:
    """What a person reads; the case, as small as a minute makes it, is saved for a replay."""
    if not isinstance(error, LawBroken):
        text = f"crashed: {law.name}\n" + "".join(traceback.format_exception(error))
        return failure_text(LawBroken(text, law=law.name, backend=sampler.name, case=case))
    ends = time.monotonic() + 60
    return failure_text(
        shrink(
            error,
            lambda smaller: law.run(smaller, sampler, device),
            should_stop=lambda: time.monotonic() > ends,
        )
    )


def band_shares(cases: int = 200) -> dict[str, list[float]]:
    """Law -> mean and largest share of the coin space that float32 may decide either way."""
    from test_oracle import ambiguous_share  # noqa: PLC0415

    from treeconv.judge import target_rows  # noqa: PLC0415

    shares: dict[str, list[float]] = {}
    for kind in BANDED:
        found: list[float] = []

        def look(case, found):  # noqa: ANN001, ANN202
            for request in case.requests:
                found.append(
                    ambiguous_share(request.tree, target_rows(request, case.kind, case.filter_order))
                )

        given_cases = given(case=cases_for(kind), found=just(found))(look)
        seed(1)(suite_settings(cases)(given_cases))()
        shares[kind] = [sum(found) / len(found), max(found)]
    return {law.name: shares[law.cases] for law in BACKEND_LAWS if law.cases in shares}


def pairs() -> dict[str, list[str]]:
    """Law -> the samplers that it applies to."""
    return {
        law.name: [
            name
            for name in sampler_names()
            if why_not(law, sampler_named(name)) is None  # type: ignore[arg-type]
        ]
        for law in BACKEND_LAWS
    }


class Board:
    """The counts on disk, and which job is next.

    A law's seeds are handed out in turn and never again, whatever became of their jobs: no case counts twice.
    """

    def __init__(self) -> None:
        stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        self.counts: Counts = defaultdict(dict, stored.get("judged", {}))
        self.seeds: dict[str, int] = defaultdict(int, stored.get("seeds", {}))
        self.shares = band_shares()
        self.pairs = pairs()
        self.running: Counter[str] = Counter()  # law -> cases

    def cases_of(self, name: str, law: str) -> int:
        """Cases judged of a pair so far."""
        return self.counts.get(name, {}).get(law, [0])[0]

    def next_job(self, slow_every: int) -> Job | None:
        """Of the least tried law, on the samplers that are short of the aim.

        Those that come first go on alone until they are there; slow ones alone come last.
        """
        waiting = []
        for law, names in self.pairs.items():
            due = [name for name in names if can_run(name) and self.cases_of(name, law) < AIM]
            late = all(name not in FIRST or is_slow(name, law) for name in due)
            if not late:
                due = [name for name in due if name in FIRST or is_slow(name, law)]
            quick = [name for name in due if not is_slow(name, law)]
            tried = min((self.cases_of(name, law) for name in quick or due), default=AIM)
            tried += self.running[law]
            if due and (tried < AIM or not quick):
                waiting.append((not quick, late, tried, law, due))
        if not waiting:
            return None
        only_slow, _, _, law, due = min(waiting, key=lambda job: job[:3])
        self.seeds[law] += 1
        self.running[law] += FEW if only_slow else DEFAULT_MAX_EXAMPLES
        if only_slow:
            return Job(law, self.seeds[law], tuple(due), FEW, 1)
        return Job(law, self.seeds[law], tuple(due), DEFAULT_MAX_EXAMPLES, slow_every)

    def add(self, found: Found) -> None:
        """Count a job that has ended."""
        law = found.job.law
        self.running[law] -= found.job.cases
        for name, cases in found.cases.items():
            before = self.counts[name].get(law, [0, 0, 0, 0])
            more = (cases, found.decisions[name], name in found.alarms, 1)
            self.counts[name][law] = [old + new for old, new in zip(before, more, strict=True)]

    def save(self) -> None:
        """Write the counts, a sampler a line, atomically."""
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(laws)}" for name, laws in self.counts.items())
        count = sum(map(len, self.pairs.values()))
        firsts = sum(name in FIRST for names in self.pairs.values() for name in names)
        part = RESULTS.with_suffix(".part")
        part.write_text(
            f'{{"pairs": {count}, "firsts": {firsts}, "band": {json.dumps(self.shares)},\n'
            f' "seeds": {json.dumps(self.seeds)},\n'
            f' "judged": {{\n{lines}}}}}\n'
        )
        part.replace(RESULTS)


def render() -> str:
    """The table, from the stored results alone."""
    stored = json.loads(RESULTS.read_text())
    results, shares = stored["judged"], stored["band"]
    every = [counts for laws in results.values() for counts in laws.values()]
    firsts = [counts for name in FIRST for counts in results.get(name, {}).values()]
    head = HEAD.format(
        cases=f"{sum(counts[0] for counts in every):,}",
        decisions=f"{sum(counts[1] for counts in every):,}",
        alarms=sum(counts[2] for counts in every),
        aim=f"{AIM:,}",
        pairs=stored["pairs"],
        reached=sum(counts[0] >= AIM for counts in every),
        first=sum(counts[0] >= AIM for counts in firsts),
        firsts=stored["firsts"],
        untried=stored["firsts"] - len(firsts),
        fewest=f"{min(counts[0] for counts in firsts):,}",
    )
    rows = []
    for name, laws in results.items():
        cases, decisions, alarms, _ = map(sum, zip(*laws.values(), strict=True))
        fewest = min(counts[0] for counts in laws.values())
        rows.append(f"| {name} | {len(laws)} | {fewest:,} | {cases:,} | {decisions:,} | {alarms} |")
    bands = [f"| {law} | {mean:.2g} | {worst:.2g} |" for law, (mean, worst) in shares.items()]
    columns = "| sampler | laws | fewest cases of a law | cases | decisions | alarms |"
    table = "\n".join([columns, "|" + " --- |" * 6, *rows])
    band = "\n".join(["| law | mean | largest |", "|" + " --- |" * 3, *bands])
    return f"{head}{table}\n\n{BAND}\n{band}\n"


def end_with(parent: int, devices: int) -> None:
    """Let a worker end soon after its parent was killed, whom it would tell; and give it a CUDA device."""
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(os.getpid() % devices)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def progress(board: Board, found: Found) -> str:
    """What a job did, and how far all are."""
    every = [counts[0] for laws in board.counts.values() for counts in laws.values()]
    cases = sum(found.cases.values())
    return (
        f"{found.job.law}: {max(found.cases.values(), default=0)} cases on {len(found.cases)} samplers in"
        f" {found.seconds:.0f} s, {cases / found.seconds:.0f} a second; {sum(every):,} in all,"
        f" {sum(count >= AIM for count in every)} pairs there"
    )


def main() -> int:
    """Judge the least tried laws until the time is up; 1 if any right sampler was flagged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--slow-every", type=int, default=SLOW_EVERY)
    parser.add_argument(
        "--cuda", action="store_true", help="judge `triton` on a CUDA device, not interpreted"
    )
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.render:
        TABLE.write_text(render())
        return 0
    board = Board()
    ends = time.monotonic() + options.seconds
    alarms = 0
    devices = torch.cuda.device_count() if options.cuda else 0
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(
        options.jobs, mp_context=spawn, initializer=end_with, initargs=(os.getpid(), devices)
    ) as pool:
        running: set[Future[Found]] = set()
        while True:
            while len(running) < options.jobs and time.monotonic() < ends:
                job = board.next_job(options.slow_every)
                if job is None:
                    break
                running.add(pool.submit(judged, job))
            board.save()  # the seeds are spent
            if not running:
                break
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                found = future.result()
                board.add(found)
                alarms += len(found.alarms)
                for name, text in found.alarms.items():
                    print(f"false alarm on {name}:\n{text}", flush=True)
                print(progress(board, found), flush=True)
    TABLE.write_text(render())
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
