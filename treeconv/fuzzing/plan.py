"""The jobs of a campaign, in an order that the configuration alone decides."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from treeconv.errors import InvalidArgument
from treeconv.fuzzing.session import Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from treeconv.fuzzing.session import Config
    from treeconv.fuzzing.store import Store

__all__ = ["CAMPAIGNS", "check_campaigns", "jobs", "stored_jobs"]

#: name -> what it searches
CAMPAIGNS = {
    "laws": "Hypothesis over every law of trees and backends, aimed at boundaries, deep walks and ties",
    "parsers": "the converter and every reader of outside data, guided by coverage where atheris is there",
    "bulk": "thousands of random trees a launch against a float64 oracle on the device",
    "device": "the laws of a device's width (treeconv.gpu_laws): graphs, coins, offsets, full vocabularies",
}
_SHELVES = ("seeds", "regressions", "crashes")


def check_campaigns(names: Sequence[str], device: str) -> tuple[str, ...]:
    """Campaigns by name, in their order; "all" is every one, "device" only on a CUDA device.

    Raises:
        InvalidArgument: an unknown name.
    """
    for name in names:
        if name not in (*CAMPAIGNS, "all"):
            raise InvalidArgument(f"campaign={name!r}, but must be all or one of {', '.join(CAMPAIGNS)}")
    if not names or "all" in names:
        return tuple(name for name in CAMPAIGNS if name != "device" or device.startswith("cuda"))
    return tuple(name for name in CAMPAIGNS if name in names)


def stored_jobs(store: Store, backends: Sequence[str]) -> list[Job]:
    """What was left unshrunk, then every stored case on every backend."""
    made = [Job("shrink", digest) for digest, found in store.load().items() if found.state == "raw"]
    for shelf in _SHELVES:
        for path in sorted((store.corpus / shelf).rglob("*")):
            if path.suffix in (".json", ".trace", ".input"):
                made += _on_each(path, store, [""] if path.suffix == ".input" else backends)
    return made


def _on_each(path: Path, store: Store, backends: Sequence[str]) -> list[Job]:
    name = path.relative_to(store.corpus).as_posix()
    return [Job("replay", name, backend) for backend in backends]


def _subjects(config: Config, campaign: str) -> list[Job]:
    """One round of a campaign."""
    from treeconv.laws import BACKEND_LAWS  # noqa: PLC0415
    from treeconv.tree_laws import TREE_LAWS  # noqa: PLC0415

    on = config.backends
    if campaign == "laws":
        trees = [Job(campaign, law.name) for law in TREE_LAWS]
        return trees + [Job(campaign, law.name, name) for law in BACKEND_LAWS for name in on]
    if campaign == "parsers":
        from treeconv.fuzzing.parsers import PARSERS  # noqa: PLC0415

        return [Job(campaign, parser.name) for parser in PARSERS]
    if campaign == "bulk":
        from treeconv.fuzzing.bulk import BULK_SUBJECTS  # noqa: PLC0415

        return [Job(campaign, kind, name) for kind in BULK_SUBJECTS for name in on]
    from treeconv.gpu_laws import GPU_LAWS  # noqa: PLC0415

    converter = [law for law in GPU_LAWS if law.subject == "converter" and config.device.startswith("cuda")]
    others = [law for law in GPU_LAWS if law.subject != "converter"]
    alone = [Job(campaign, law.name) for law in converter]
    return alone + [Job(campaign, law.name, name) for law in others for name in on]


def jobs(config: Config, stored: Sequence[Job]) -> Iterator[Job]:
    """The stored cases, then round after round of every campaign; each round takes the campaigns in turns."""
    yield from stored
    rounds = itertools.count() if config.rounds is None else range(config.rounds)
    campaigns = [_subjects(config, campaign) for campaign in config.campaigns]
    for number in rounds:
        for turn in itertools.zip_longest(*campaigns):
            for job in turn:
                if job is not None:
                    yield Job(job.campaign, job.subject, job.backend, number)
