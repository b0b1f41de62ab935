"""``python -m sft.wsi``."""

import sys

__all__: list[str] = []

#: Modules of the extra ``wsi`` that every command imports.
_REQUIRED_MODULES = ("PIL", "jsonargparse", "matplotlib", "safetensors", "sklearn", "yaml")

if __name__ == "__main__":
    from sft.cli.main import exit_on_interrupt
    from sft.common.installation import install_command, missing_modules

    missing = missing_modules(_REQUIRED_MODULES)
    if missing:
        sys.exit(f"error: python -m sft.wsi needs its extra, of which {', '.join(missing)} cannot be imported: {install_command('wsi')}")
    with exit_on_interrupt():  # the libraries take a few seconds to load
        from sft.wsi.cli import main
    sys.exit(main())
