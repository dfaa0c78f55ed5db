"""The campaign over every law: ``python fuzz/laws.py [options of treeconv fuzz]``."""

import sys

from treeconv.cli import main

if __name__ == "__main__":
    sys.exit(main(["fuzz", "--campaign", "laws", *sys.argv[1:]]))
