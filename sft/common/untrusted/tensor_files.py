"""Files of ``torch.save``, read without running code from them.

Such a file is a pickle, and a pickle may call any function. ``torch.load(weights_only=True)`` admits tensors, numbers, texts and
collections of these. Its error message recommends ``weights_only=False``, which would run what it has just refused; the message here names
the refused object instead.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from sft.common.errors import SourceError

__all__ = ["load_tensor_file"]

_REFUSED_OBJECT = re.compile(r"GLOBAL ([\w.<>]+)")


def load_tensor_file(path: Path) -> Any:
    """The content of a file of ``torch.save``, on the CPU: tensors, numbers, texts, and collections of these.

    Raises:
        SourceError: the file cannot be read, is damaged, or names other objects.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise SourceError(f"{path} is a compressed archive, which torch.save does not write; save the tensors again")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols that it may not know
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = _REFUSED_OBJECT.search(str(error))
        reason = (
            f"it names {name[1]}, which is code or an object of a class" if name else "it is damaged, or was pickled by another program"
        )
        raise SourceError(f"{path} is not read: {reason}. Save a state_dict: tensors, numbers and texts, by name.") from error
    except SourceError:
        raise
    except OSError as error:
        if error.errno is None:  # of torch, about the contents
            raise SourceError(f"{path} cannot be read ({error}). It is damaged; copy it again.") from error
        raise SourceError(f"{path} cannot be read: {error.strerror}. Check the path.") from error
    except Exception as error:  # a damaged file raises almost anything
        raise SourceError(
            f"{path} cannot be read ({type(error).__name__}: {_first_sentence(error)}). It is damaged; copy it again."
        ) from error


def _first_sentence(error: Exception) -> str:
    return (str(error).strip() or "no content").splitlines()[0].split(". ")[0]
