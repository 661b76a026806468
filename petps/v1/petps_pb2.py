"""The messages and enums of petps.proto, as classes of whatever protobuf is installed.

The build compiles petps.proto to a descriptor, and the classes are made from it at import. Code
that protoc generates would refuse every protobuf older than that protoc, and every one of a later
major version but the next. Rows travel in it as bytes, so its speed does not matter here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pool, message_factory

from petps.v1.descriptor import SERIALIZED

DESCRIPTOR: Final = descriptor_pool.Default().AddSerializedFile(SERIALIZED)

for _name, _message in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_message)
for _enum in DESCRIPTOR.enum_types_by_name.values():
    globals().update({value.name: value.number for value in _enum.values})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
