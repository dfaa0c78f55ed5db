"""``python -m treeconv``."""

import sys

from treeconv.cli import main

if __name__ == "__main__":
    sys.exit(main())
