"""The messages and enums of a .proto file, as classes of whatever protobuf is installed.

The build compiles the file to a descriptor, and the classes are made from it at import. Code that
protoc generates would refuse every protobuf older than that protoc, and every one of a later major
version but the next. Rows travel in messages as bytes, so their speed does not matter here.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory

__all__ = ["load"]


def load(serialized: bytes, names: dict[str, Any]) -> Any:
    """Add the messages and enums of a serialized file to ``names``; return its descriptor."""
    file = descriptor_pool.Default().AddSerializedFile(serialized)
    for name, message in file.message_types_by_name.items():
        names[name] = message_factory.GetMessageClass(message)
    for enum in file.enum_types_by_name.values():
        names.update({value.name: value.number for value in enum.values})
    return file
