"""Verifiers: what can be driven by :func:`treeconv.verify` and judged by the laws."""
