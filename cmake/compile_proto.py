"""Compile a .proto file to a Python module with its serialized descriptor.

Called by the build: compile_proto.py ROOT PROTO OUTPUT, with PROTO relative to ROOT.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc


def main() -> None:
    """Run protoc and write the module."""
    root, proto, output = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "descriptor"
        if protoc.main(["", f"--proto_path={root}", f"--descriptor_set_out={path}", proto]) != 0:
            sys.exit(1)  # protoc has printed the reason
        (file,) = FileDescriptorSet.FromString(path.read_bytes()).file
    head = f'"""Generated from {proto}: its descriptor."""\n\n'
    body = f"{head}SERIALIZED = {file.SerializeToString()!r}\n"
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(body)


if __name__ == "__main__":
    main()
