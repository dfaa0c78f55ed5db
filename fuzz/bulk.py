"""The bulk campaign, thousands of trees a launch: ``python fuzz/bulk.py [options of treeconv fuzz]``.

``python fuzz/bulk.py --rate DEVICE BACKEND...`` measures judged trees a second instead.
"""

import sys

from treeconv.cli import main
from treeconv.fuzzing.bulk import BULK_SUBJECTS, rate
from treeconv.suite import load_backend

if __name__ == "__main__":
    if sys.argv[1:2] != ["--rate"]:
        sys.exit(main(["fuzz", "--campaign", "bulk", *sys.argv[1:]]))
    device = sys.argv[2]
    for name in sys.argv[3:]:
        for kind in BULK_SUBJECTS:
            count = 131072 if device.startswith("cuda") else 2048
            trees, unsure = rate(load_backend(name, device), device, kind, 3.0, count)
            print(  # noqa: T201
                f"{name} on {device}, {kind}: {trees:,.0f} judged trees a second (V 64, N 16, {count} a"
                f" launch), {unsure:.1%} may be decided otherwise in float32"
            )
