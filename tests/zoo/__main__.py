"""``make test-zoo``. A script, so that ``-P`` keeps this folder's names off ``sys.path``; each case's process imports it once more."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
# After the installed packages, which the repository's folders must not hide.
sys.path.append(str(_ROOT))
sys.path.append(str(_ROOT / "benchmarks"))  # for `harness`, which writes the results

if __name__ == "__main__":
    from tests.zoo.suite import main

    raise SystemExit(main())
