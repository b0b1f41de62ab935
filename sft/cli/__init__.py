"""The command line: ``python -m sft doctor | check | plan | tune``."""
