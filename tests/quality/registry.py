"""All planted faults in one list, whatever is wrong: a sampler, filters, coins, a converter, a runner.

A module of faults calls :func:`planting` for its list and its decorator, and is named in ``MODULES``. What
each fault must die by is named in advance; :func:`hunt` says whether it does.
"""

import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from unittest import mock

from treeconv._gpu_checks import Sizes
from treeconv.errors import LawBroken
from treeconv.gpu_laws import GPU_LAWS, gpu_law_named
from treeconv.laws import BACKEND_LAWS, law_named
from treeconv.suite import DEFAULT_MAX_EXAMPLES, check_law
from treeconv.tree_laws import TREE_LAWS, tree_law_named

MODULES = (
    "faults",
    "variant_faults",
    "smuggled_faults",
    "rule_faults",
    "processor_faults",
    "processed_rule_faults",
    "mixed_faults",
    "filter_faults",
    "rng_faults",
    "shared_coin_faults",
    "sampled_faults",
    "tree_faults",
    "graph_faults",
)

KINDS = {
    "K1": "zero-mass tokens, edges of the distribution, coins at 0 and 1",
    "K2": "acceptance uses a proposal law the draft did not follow",
    "K3": "temperature or filters lost or applied differently",
    "K4": "residual or bonus token from the wrong row or law",
    "K5": "coins reused, mixed up or ignored; seeds, steps, ranks",
    "K6": "tree layout: children lost or in another order, malformed trees taken",
    "K7": "attention mask, positions, rows of other nodes",
    "K8": "ragged batches, padding, per-request values",
    "K9": "committing the accepted path: counts, caps, slots",
    "K10": "stale or overwritten buffers, graph replay",
    "K11": "NaN, tiny temperatures, ties",
    "K12": "index overflow",
    "K13": "grammar, bias and penalties on nodes",
}


@dataclass(frozen=True)
class Fault:
    """Something deliberately wrong.

    Args:
        name: says what is wrong.

        kind: a key of ``KINDS``.

        killed_by: laws that must kill it, each alone, within the default number of cases.

        made: its class, made anew for each hunt: some keep state. A verifier for laws about verifiers;
            with a class attribute ``patches`` (a dotted name) its instance stands in for what is named there.
    """

    name: str
    kind: str
    killed_by: tuple
    made: type

    @contextmanager
    def planted(self):
        """The wrong verifier; or None while something else of ours is wrong."""
        made = self.made()
        patches = getattr(made, "patches", None)
        if patches is None:
            made.name = self.name
            yield made
            return
        with mock.patch(patches, made):
            yield getattr(made, "backend", None)


def spelled(name):
    """A class's name as failures spell it."""
    return "".join("-" + c.lower() if c.isupper() else c for c in name).lstrip("-")


def planting():
    """A list of faults, and the decorator ``fault(kind, *laws)`` that fills it."""
    faults = []

    def fault(kind, *killed_by):
        def register(made):
            faults.append(Fault(spelled(made.__name__), kind, killed_by, made))
            return made

        return register

    return faults, fault


def all_faults():
    """Every planted fault, by kind."""
    faults = [fault for module in MODULES for fault in import_module(module).FAULTS]
    return sorted(faults, key=lambda fault: list(KINDS).index(fault.kind))


@dataclass(frozen=True)
class Hunt:
    """What became of one fault under one law."""

    broken: LawBroken | None
    examples: int
    cpu_seconds: float

    @property
    def nodes(self):
        """Nodes of the largest tree of the failing case; None where the law makes its own trees."""
        case = self.broken and self.broken.case
        return max(len(request.tree) for request in case.requests) if case else None


def hunt(fault, law, seed=1, *, shrink=True):
    """Hold a fault to a law at the default profile, as ``treeconv verify`` would."""
    started = time.process_time()
    with fault.planted() as backend:
        if law in {known.name for known in GPU_LAWS}:
            broken, examples = None, 1
            try:
                gpu_law_named(law).run(backend, "cpu", Sizes.small(), seed)
            except LawBroken as error:
                broken = error
        else:
            is_tree_law = law in {known.name for known in TREE_LAWS}
            known = tree_law_named(law) if is_tree_law else law_named(law)
            outcome = check_law(known, backend, max_examples=DEFAULT_MAX_EXAMPLES, seed=seed, shrink=shrink)
            broken, examples = outcome.broken, outcome.cases
    return Hunt(broken, examples, time.process_time() - started)


LAWS = {law.name: law for law in (*TREE_LAWS, *BACKEND_LAWS, *GPU_LAWS)}
