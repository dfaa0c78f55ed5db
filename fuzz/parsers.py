"""The converter and all readers: ``python fuzz/parsers.py [options of treeconv fuzz]``."""

import sys

from treeconv.cli import main

if __name__ == "__main__":
    sys.exit(main(["fuzz", "--campaign", "parsers", *sys.argv[1:]]))
