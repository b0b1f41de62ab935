"""Entry point of ``python -m sft``."""

from sft.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
