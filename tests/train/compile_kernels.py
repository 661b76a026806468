"""A compilation of every Triton kernel to a GPU's machine code, which needs no GPU.

train_kernels.py runs this in a separate process, because its own kernels are interpreted.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from petps.train.kernels import intersect, rank

HOPPER = GPUTarget("cuda", 90, 32)
CONSTANTS = {"steps": 20, "size": rank.BLOCK}
NUMBERS = ("n", "m")


def type_of(argument: str) -> str:
    if argument in NUMBERS:
        return "i32"
    return "*i32" if argument == "flags" else "*i64"


def main() -> None:
    for module in (intersect, rank):
        for name, kernel in vars(module).items():
            if not isinstance(kernel, triton.JITFunction) or kernel.__module__ != module.__name__:
                continue
            fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
            signature = {
                argument: "constexpr" if argument in fixed else type_of(argument)
                for argument in kernel.arg_names
            }
            source = ASTSource(
                kernel, signature=signature, constexprs={name: CONSTANTS[name] for name in fixed}
            )
            built = triton.compile(source, target=HOPPER)
            print(f"{name}: {len(built.asm['cubin'])} bytes", flush=True)


if __name__ == "__main__":
    main()
