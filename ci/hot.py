import csv, subprocess, sys, collections
out = subprocess.run(["ncu", "-i", sys.argv[1], "--page", "source", "--csv", "--print-units", "base"], capture_output=True, text=True).stdout
rows = list(csv.reader(out.splitlines()))
h = next(i for i, r in enumerate(rows) if "Source" in r)
cols = {n: i for i, n in enumerate(rows[h])}
open(sys.argv[2], "w").write(out)
print([c for c in cols][:40])
