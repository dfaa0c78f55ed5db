"""Asks treeconv's pytest plugin for its report header: versions, backends, device and seed."""

import pytest

from treeconv.pytest_plugin import HAS_SUITE


def pytest_configure(config: pytest.Config) -> None:
    config.stash[HAS_SUITE] = True
