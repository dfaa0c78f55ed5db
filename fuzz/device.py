"""The laws of a GPU, with ever other seeds: ``python fuzz/device.py [options of treeconv fuzz]``."""

import sys

from treeconv.cli import main

if __name__ == "__main__":
    sys.exit(main(["fuzz", "--campaign", "device", *sys.argv[1:]]))
