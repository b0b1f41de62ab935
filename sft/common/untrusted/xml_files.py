"""XML of unknown origin: documents with a document type are refused, since entities can expand to any size or name other files.

A few nested entities ("billion laughs") expand to gigabytes, and an external entity reads a file or a URL. Formats of annotations and
image metadata have neither.
"""

from __future__ import annotations

from xml.etree import ElementTree
from xml.parsers import expat

__all__ = ["XmlError", "parse_xml"]

#: Elements inside one another.
_MAX_DEPTH = 200


class XmlError(ValueError):
    """Text that is not XML, or XML with a document type."""


def parse_xml(text: str | bytes) -> ElementTree.Element:
    """Root element of an XML document.

    >>> parse_xml("<a><b/></a>")[0].tag
    'b'
    >>> parse_xml('<!DOCTYPE a [<!ENTITY b "boom">]><a>&b;</a>')
    Traceback (most recent call last):
        ...
    sft.common.untrusted.xml_files.XmlError: it has a document type, and its entities may expand to any size

    Raises:
        XmlError: no XML, or XML with a document type.
    """
    builder = ElementTree.TreeBuilder()
    parser = expat.ParserCreate(namespace_separator="}")
    depth = 0

    def refuse(*_: object) -> None:
        raise XmlError("it has a document type, and its entities may expand to any size")

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise XmlError(f"its elements have more than {_MAX_DEPTH} levels, one inside the other")
        builder.start(_qualified(name), {_qualified(key): value for key, value in attributes.items()})

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(_qualified(name))

    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = start, end, builder.data
    parser.buffer_text = True
    try:
        parser.Parse(text, True)
        return builder.close()
    except expat.ExpatError as error:
        raise XmlError(f"it is not XML ({expat.ErrorString(error.code)}, line {error.lineno}, column {error.offset + 1})") from error


def _qualified(name: str) -> str:
    """Name with its namespace as ElementTree writes it: ``{namespace}name``."""
    return "{" + name if "}" in name else name
