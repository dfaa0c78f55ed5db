"""``treeconv corpus minimise``."""
