"""``python -m sft.wsi``."""

import sys

from sft.wsi.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
