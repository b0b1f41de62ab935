"""``python -m sft.wsi``."""

import sys

__all__: list[str] = []

if __name__ == "__main__":
    try:
        from sft.wsi.cli import main
    except KeyboardInterrupt:  # the libraries take a few seconds to load
        sys.exit(130)
    sys.exit(main())
