"""``python -m sft.wsi``."""

import sys

__all__: list[str] = []

if __name__ == "__main__":
    from sft.cli.main import exit_on_interrupt

    with exit_on_interrupt():  # the libraries take a few seconds to load
        from sft.wsi.cli import main
    sys.exit(main())
